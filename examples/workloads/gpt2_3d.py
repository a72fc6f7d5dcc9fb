# mypy: ignore-errors
"""GPT2-S of Megatron-core on eight ranks: two replicas, two pipeline stages, two tensor-parallel parts.

jitckpt run --standalone --nproc-per-node 8 gpt2_3d.py --protect
jitckpt run --standalone --nproc-per-node 8 --mode transparent gpt2_3d.py

The paper's size: --width 768 --layers 12 --heads 12 --length 1024 --vocabulary 50304.
"""

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from workload import arguments, begin, end, tell

TENSOR, PIPELINE = 2, 2  # ranks; what is left are replicas


class Trackers:
    """Megatron's random numbers for dropout, which differ by tensor-parallel rank: each rank's own."""

    def state_dict(self):
        return tensor_parallel.get_cuda_rng_tracker().get_states()

    def load_state_dict(self, states):
        tensor_parallel.get_cuda_rng_tracker().set_states(states)


def build(args):
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.width,
        num_attention_heads=args.heads,
        tensor_model_parallel_size=TENSOR,
        pipeline_model_parallel_size=PIPELINE,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,  # they need kernels that are built for a GPU
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        args.vocabulary,
        args.length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    ).cuda()
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=6e-4, weight_decay=0.1, clip_grad=1.0), [wrapped]
    )
    return wrapped, optimizer


def main() -> None:
    args = arguments(
        __doc__,
        batch=(2, "texts of a replica in a micro-batch"),
        micro=(2, "micro-batches in a minibatch"),
        length=(16, "tokens of a text"),
        vocabulary=(256, "different tokens"),
        width=(32, "features of a token"),
        layers=(2, "transformer blocks"),
        heads=(4, "attention heads"),
    )
    begin(args.seed)
    parallel_state.initialize_model_parallel(TENSOR, PIPELINE)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    model, optimizer = build(args)
    # The ranks of one replica draw the same texts.
    torch.random.default_generator.manual_seed(args.seed + 1 + parallel_state.get_data_parallel_rank())
    positions = torch.arange(args.length).expand(args.batch, -1).cuda()
    mask = torch.ones(1, 1, args.length, args.length, dtype=torch.bool).triu(1).cuda()
    forward_and_backward = get_forward_backward_func()

    def forward(data, model):
        texts = next(data)
        losses = model(texts[:, :-1].contiguous(), positions, mask, labels=texts[:, 1:].contiguous())

        def mean(output):
            loss = output.float().mean()
            return loss, {"loss": loss.detach()}

        return losses, mean

    steps = range(args.steps)
    if args.protect:
        import jitckpt

        steps = jitckpt.init(model=model, optimizer=optimizer, extra=Trackers()).steps(args.steps)
    speaker = torch.distributed.get_world_size() // PIPELINE * (PIPELINE - 1)  # the last stage's first rank
    for step in steps:
        batches = torch.randint(args.vocabulary, (args.micro, args.batch, args.length + 1)).cuda()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        told = forward_and_backward(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=args.micro,
            seq_length=args.length,
            micro_batch_size=args.batch,
        )
        optimizer.step()
        if told:
            tell(step, sum(one["loss"] for one in told) / args.micro, speaker)
    end(model, [one.optimizer for one in optimizer.chained_optimizers])


if __name__ == "__main__":
    main()
