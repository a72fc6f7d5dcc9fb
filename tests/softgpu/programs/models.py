"""Small models and the loop that trains them, the same on every device."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

VOCABULARY, CONTEXT = 65, 32


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # .float(): CUDA's autocast runs normalisations and losses in single precision, the CPU's does not.
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.projections(self.before_attention(x.float())).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden: Tensor = self.mlp(self.before_mlp(x.float()))
        return x + hidden


class GPT(nn.Module):
    """Takes (tokens, targets), returns the loss; the embedding's weight is the head's too."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.dropout = dropout

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x.float())).float().flatten(0, 1), targets.flatten())


class ConvNet(nn.Sequential):
    """Takes (images, classes), returns the loss."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1, groups=4),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:  # type: ignore[override]
        for layer in self:
            images = layer(images)
        return F.cross_entropy(images, classes)


class Residual(nn.Module):
    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        wider = channels * stride
        self.first = nn.Conv2d(channels, wider, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(wider, wider, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(wider) for _ in range(2))
        self.shortcut = nn.Conv2d(channels, wider, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norms[0](self.first(x)).relu()
        return torch.relu(self.norms[1](self.second(hidden)) + self.shortcut(x))


class ResNet(nn.Module):
    """Takes (images, classes), returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            Residual(8, 1),
            Residual(8, 2),
            Residual(16, 2),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(images).flatten(1)), classes)


class Bags(nn.Module):
    """Takes (tokens, targets), returns the loss; a bag of words for each text, in every mode."""

    def __init__(self) -> None:
        super().__init__()
        modes = ("sum", "mean", "max")
        self.bags = nn.ModuleList(nn.EmbeddingBag(VOCABULARY, 16, mode=mode) for mode in modes)
        self.head = nn.Linear(48, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        texts = torch.arange(0, tokens.numel(), tokens.shape[1], device=tokens.device)
        found = [bag(tokens.flatten(), texts) for bag in self.bags]
        return F.cross_entropy(self.head(torch.cat(found, -1)), targets[:, 0])


class Recurrent(nn.Module):
    """Takes (tokens, targets), returns the loss."""

    def __init__(self, kind: str, **options: bool | float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layer = getattr(nn, kind)(32, 48, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(96 if options.get("bidirectional") else 48, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        outputs = self.head(self.layer(self.embedding(tokens))[0])
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Normed(nn.Module):
    """Takes (tokens, targets), returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, 32), nn.RMSNorm(32)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(self.embedding(tokens))).flatten(0, 1), targets.flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": GPT,
    "convnet": ConvNet,
    "resnet": ResNet,
    "embedding bag": Bags,
    "lstm": lambda: Recurrent("LSTM"),
    "bidirectional lstm": lambda: Recurrent("LSTM", bidirectional=True),
    "gru": lambda: Recurrent("GRU"),
    "rnn": lambda: Recurrent("RNN"),
    "rmsnorm": Normed,
}

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False),
    "sgd foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, foreach=False),
    "adam foreach": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, foreach=True),
    "adam fused": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, fused=True),
    "adam capturable": lambda parameters: torch.optim.Adam(
        parameters, lr=1e-3, foreach=False, capturable=True
    ),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "adamw capturable": lambda parameters: torch.optim.AdamW(
        parameters, lr=1e-3, foreach=True, capturable=True
    ),
}


def batch(name: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A made-up minibatch for a model of MODELS, on the host."""
    if name in ("convnet", "resnet"):
        return torch.randn(8, 3, 32, 32, generator=generator), torch.randint(0, 10, (8,), generator=generator)
    tokens = torch.randint(0, VOCABULARY, (8, CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@dataclass(frozen=True)
class Recipe:
    """What to train and how; `autocast` is a dtype's name or empty."""

    model: str
    optimizer: str = "sgd"
    autocast: str = ""
    steps: int = 4
    micro_batches: int = 2
    channels_last: bool = False


def train(recipe: Recipe, device: str) -> dict[str, Tensor]:
    """Trains on the device and returns the model's state on the host, and the last loss as "loss"."""
    torch.manual_seed(0)
    model = MODELS[recipe.model]().to(device)
    if recipe.channels_last:
        channels_last: Any = {"memory_format": torch.channels_last}  # torch 2.11's stubs lack this overload
        model = model.to(**channels_last)
    optimizer = OPTIMIZERS[recipe.optimizer](model.parameters())
    dtype = getattr(torch, recipe.autocast) if recipe.autocast else torch.bfloat16
    scaler = GradScaler(device, enabled=recipe.autocast == "float16")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros(())
    for _ in range(recipe.steps):
        for _ in range(recipe.micro_batches):
            inputs, targets = (tensor.to(device) for tensor in batch(recipe.model, generator))
            if recipe.channels_last:
                inputs = inputs.to(memory_format=torch.channels_last)
            with torch.autocast(device, dtype=dtype, enabled=bool(recipe.autocast)):
                loss = model(inputs, targets) / recipe.micro_batches
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    return state | {"loss": loss.detach().cpu()}
