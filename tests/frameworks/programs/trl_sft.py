# mypy: ignore-errors
"""Fine-tuning with trl and PEFT: a tiny GPT-2 under LoRA, accumulation, evaluation, shuffled texts."""

import json
import os
import sys

import torch
from datasets import Dataset
from ends import digest, may_be_killed, passes
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer
from trl.kernels import chunked_logprob

chunked_logprob._TRITON_AVAILABLE = False  # softgpu runs no kernels of Triton's

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61))]


def tokenizer():
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


class Places(TrainerCallback):
    def on_substep_end(self, *args, **kwargs):
        passes("substep ends")

    def on_pre_optimizer_step(self, *args, **kwargs):
        passes("optimizer begins")

    def on_step_end(self, *args, **kwargs):
        passes("step ends")

    def on_log(self, *args, **kwargs):
        passes("log")

    def on_evaluate(self, *args, **kwargs):
        passes("evaluated")

    def on_save(self, *args, **kwargs):
        passes("saved")

    def on_epoch_end(self, *args, **kwargs):
        passes("epoch ends")


def texts(number):
    return Dataset.from_list(
        [
            {"text": " ".join(f"w{(at * step) % 61}" for step in range(4 + at % 5))}
            for at in range(1, number + 1)
        ]
    )


def main():
    set_seed(3)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    arguments = SFTConfig(
        output_dir=sys.argv[1] + "/own",
        num_train_epochs=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=int(os.environ.get("LOGGING", "2")),
        eval_strategy="epoch",
        save_strategy="no",
        max_length=16,
        report_to=[],
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    ranks = int(os.environ["WORLD_SIZE"])
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=texts(16 * ranks),
        eval_dataset=texts(4 * ranks),
        processing_class=tokenizer(),
        peft_config=LoraConfig(
            r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True
        ),
        callbacks=[Places()],
    )
    trainer.train()
    logs = [
        {key: value for key, value in one.items() if "runtime" not in key and "per_second" not in key}
        for one in trainer.state.log_history
    ]
    end = {
        "parameters": digest(model.state_dict()),
        "optimizer": digest(trainer.optimizer.state_dict()["state"]),
        "scheduler": trainer.lr_scheduler.state_dict()["last_epoch"],
        "random": digest(torch.get_rng_state(), torch.cuda.get_rng_state()),
        "steps": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "logs": logs,
    }
    with open(f"{sys.argv[1]}/end-{os.environ['RANK']}.json", "w") as file:
        json.dump(end, file, indent=1)
    torch.distributed.destroy_process_group()


may_be_killed()
main()
