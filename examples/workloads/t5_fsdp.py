# mypy: ignore-errors
"""T5 of transformers with PyTorch's FSDP: two shards, of which four ranks have two replicas each.

jitckpt run --standalone --nproc-per-node 4 t5_fsdp.py --protect
jitckpt run --standalone --nproc-per-node 4 --mode transparent t5_fsdp.py

The paper's size, T5-3B: --width 1024 --inner 16384 --layers 24 --heads 32 --key 128 --vocabulary 32128.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block
from workload import arguments, begin, end, tell


def main() -> None:
    args = arguments(
        __doc__,
        batch=(4, "pairs of texts of one rank in a minibatch"),
        length=(16, "tokens of a text"),
        vocabulary=(256, "different tokens"),
        width=(32, "features of a token"),
        inner=(64, "features inside of a perceptron"),
        layers=(2, "blocks of the encoder, and of the decoder"),
        heads=(4, "attention heads"),
        key=(8, "features of a head"),
    )
    rank = begin(args.seed)
    ranks = torch.distributed.get_world_size()
    config = T5Config(
        vocab_size=args.vocabulary,
        d_model=args.width,
        d_ff=args.inner,
        d_kv=args.key,
        num_layers=args.layers,
        num_heads=args.heads,
        decoder_start_token_id=0,
        use_cache=False,
    )
    model = T5ForConditionalGeneration(config).cuda()
    mesh = init_device_mesh("cuda", (ranks // 2, 2), mesh_dim_names=("replicate", "shard"))
    for block in model.modules():
        if isinstance(block, T5Block):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(args.seed + 1 + rank)  # each rank has texts of its own, and drops other features

    steps = range(args.steps)
    if args.protect:
        import jitckpt

        steps = jitckpt.init(model=model, optimizer=optimizer).steps(args.steps)
    for step in steps:
        texts, answers = torch.randint(1, args.vocabulary, (2, args.batch, args.length)).cuda()
        loss = model(input_ids=texts, labels=answers).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tell(step, loss.detach())
    end(model, [optimizer])


if __name__ == "__main__":
    main()
