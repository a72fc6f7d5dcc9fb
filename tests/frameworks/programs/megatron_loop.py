# mypy: ignore-errors
"""A training with Megatron-core: a tiny GPT, its own random numbers, a shuffled loader, a scheduler.

SHARDED=1 has its distributed optimizer, SHARDED=2 one that gathers parameters beside the next pass.
"""

import json
import os
import sys

import torch
from ends import PRECISION, DataLoader, digest, log_loss, may_be_killed, state_of
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch.utils.data import Dataset, DistributedSampler

EPOCHS, LENGTH, BATCH, WORDS = 3, 12, 2, 64
SHARDED = int(os.environ.get("SHARDED", "0"))
IS_HALF = PRECISION == "bf16"


class Texts(Dataset):
    def __len__(self):
        return 4 * BATCH * int(os.environ["WORLD_SIZE"])

    def __getitem__(self, index):
        text = torch.randint(WORDS, (LENGTH + 1,))  # random numbers of the data
        text[0] = index
        return text


def build():
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        gradient_accumulation_fusion=False,  # they need kernels that are built for a GPU
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        bf16=IS_HALF,
        params_dtype=torch.bfloat16 if IS_HALF else torch.float32,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), WORDS, LENGTH).cuda()
    if IS_HALF:
        model = Float16Module(config, model)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=IS_HALF,
        use_distributed_optimizer=bool(SHARDED),
        overlap_grad_reduce=SHARDED == 2,
        overlap_param_gather=SHARDED == 2,
    )
    model = DistributedDataParallel(config, settings, model)
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-3,
            weight_decay=0.1,
            clip_grad=1.0,
            bf16=IS_HALF,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=bool(SHARDED),
            overlap_param_gather=SHARDED == 2,
        ),
        [model],
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=4,
        lr_decay_steps=40,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=40,
        wd_incr_style="constant",
    )
    return model, optimizer, scheduler


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    torch.manual_seed(5)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(5)
    model, optimizer, scheduler = build()
    torch.random.default_generator.manual_seed(6 + torch.distributed.get_rank())
    positions = torch.arange(LENGTH).expand(BATCH, -1).cuda()
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1).cuda()
    forward_and_backward = get_forward_backward_func()

    def forward(data, model):
        texts = next(data).cuda()
        losses = model(texts[:, :-1].contiguous(), positions, mask, labels=texts[:, 1:].contiguous())
        log_loss(scheduler.num_steps, losses.float().mean())
        return losses, lambda output: (output.float().mean(), {})

    data = Texts()
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for texts in loader:
            model.zero_grad_buffer()
            optimizer.zero_grad()
            forward_and_backward(
                forward_step_func=forward,
                data_iterator=iter([texts]),
                model=[model],
                num_microbatches=1,
                seq_length=LENGTH,
                micro_batch_size=BATCH,
            )
            optimizer.step()
            scheduler.step(increment=BATCH)
    if SHARDED == 2:
        model.start_param_sync(force_sync=True)
    inner = [one.optimizer for one in optimizer.chained_optimizers]
    end = {
        "parameters": digest(model.state_dict()),
        "masters": digest([group["params"] for one in inner for group in one.param_groups]),
        "optimizer": digest([state_of(one) for one in inner]),
        "rates": [[group["lr"] for group in one.param_groups] for one in inner],
        "scheduler": scheduler.num_steps,
        "random": digest(
            torch.get_rng_state(),
            torch.cuda.get_rng_state(),
            tensor_parallel.get_cuda_rng_tracker().get_states(),
        ),
    }
    with open(f"{sys.argv[1]}/end-{os.environ['RANK']}.json", "w") as file:
        json.dump(end, file, indent=1)
    torch.distributed.destroy_process_group()


may_be_killed()
main()
