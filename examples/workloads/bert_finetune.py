# mypy: ignore-errors
"""BERT, fine-tuned to tell texts apart by transformers' Trainer: no line of it knows of jitckpt.

jitckpt run --standalone --nproc-per-node 2 bert_finetune.py
jitckpt run --standalone --nproc-per-node 2 --mode transparent bert_finetune.py

The paper's size, BERT-B: --width 768 --inner 3072 --layers 12 --heads 12 --length 512 --vocabulary 30522.
The weights are drawn: to load some that are trained, write BertForSequenceClassification.from_pretrained.
"""

import tempfile

import torch
import transformers
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from workload import arguments, begin, end


class Texts(Dataset):
    """As many as the training needs, each with its class."""

    def __init__(self, number: int, length: int, vocabulary: int) -> None:
        random = torch.Generator().manual_seed(0)
        self.texts = torch.randint(vocabulary, (number, length), generator=random)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = self.texts[index]
        return {"input_ids": text, "labels": text[0] % 2}


class Tell(transformers.TrainerCallback):
    """Prints the losses as the other workloads do."""

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step}: loss {logs['loss']}\n", end="", flush=True)


def main() -> None:
    args = arguments(
        __doc__,
        batch=(4, "texts of one rank in a minibatch"),
        length=(16, "tokens of a text"),
        vocabulary=(256, "different tokens"),
        width=(32, "features of a token"),
        inner=(64, "features inside of a perceptron"),
        layers=(2, "transformer blocks"),
        heads=(4, "attention heads"),
    )
    begin(args.seed)
    config = BertConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.width,
        intermediate_size=args.inner,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        max_position_embeddings=args.length,
    )
    ranks = torch.distributed.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=BertForSequenceClassification(config),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=args.steps,
                per_device_train_batch_size=args.batch,
                learning_rate=5e-4,
                seed=args.seed,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Texts(8 * args.batch * ranks, args.length, args.vocabulary),  # epochs of 8 steps
            callbacks=[Tell()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    end(trainer.model, [trainer.optimizer])


if __name__ == "__main__":
    main()
