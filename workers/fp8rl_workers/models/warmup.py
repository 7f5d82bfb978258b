"""Make the builtin model: a seeded supervised warm-up of a small Qwen3, saved as Hugging Face files in BF16.

The targets are distributions, not samples: cross-entropy against the mixture of `recipe` has no sampling noise, so a few
hundred steps are enough. The completion that the model reads while it learns is drawn from the same mixture.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from fp8rl_workers.models.recipe import ModelShape, Recipe
from fp8rl_workers.models.tokenizer import EOS, EOS_ID, PAD, PAD_ID, UNKNOWN, build_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RAMP_STEPS = 30
FINAL_RATE = 0.02
REPORT_EVERY = 25
Progress = Callable[[str], None]


def build_model(shape: ModelShape, seed: int) -> Qwen3ForCausalLM:
    """A freshly initialised float32 model; the global generator is left as it was."""
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def warm_up(recipe: Recipe, progress: Progress) -> Qwen3ForCausalLM:
    """Train `recipe.steps` steps of AdamW with a linear ramp and decay; strings of equal length, train split only."""
    tokenizer = build_tokenizer(recipe.shape.vocabulary)
    model = build_model(recipe.shape, recipe.seed)
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.monotonic()
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rate(step, recipe.steps)
        prompt_BP, target_BTV = batch(recipe, tokenizer, step)
        sampled_BT = torch.multinomial(target_BTV.flatten(0, 1), 1, generator=generator).view(target_BTV.shape[:2])
        inputs = torch.cat([prompt_BP, sampled_BT[:, :-1]], dim=1)
        logits_BTV = model(inputs).logits[:, prompt_BP.shape[1] - 1 :]
        loss = -(target_BTV * logits_BTV.float().log_softmax(-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % REPORT_EVERY == 0 or step + 1 == recipe.steps:
            seconds = time.monotonic() - started
            progress(
                f"{recipe.name}: warm-up step {step + 1}/{recipe.steps}, loss {loss.item():.3f} nat, {seconds:.0f} s"
            )
    return model


def batch(recipe: Recipe, tokenizer: Tokenizer, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts [batch, P] (int64) and target distributions [batch, T, vocabulary] (float32) of warm-up step `step`.

    T = longest string + 1 (the end token); P = T of the prompt. All strings of a batch have equal length.
    """
    examples = [recipe.task.example(recipe.seed, step * recipe.batch + row, "train") for row in range(recipe.batch)]
    prompts = torch.tensor([tokenizer.encode(example.prompt).ids for example in examples])
    reverse_BL = torch.tensor([tokenizer.encode(example.answer).ids for example in examples])
    letters = [tokenizer.token_to_id(letter) for letter in recipe.task.letters]
    target = torch.zeros(*reverse_BL.shape, recipe.shape.vocabulary)
    copy_share, reverse_share = recipe.shares(step)
    target[..., letters] = (1.0 - copy_share - reverse_share) / len(letters)
    for source, share in ((reverse_BL, reverse_share), (reverse_BL.flip(1), copy_share)):
        target.scatter_add_(2, source[..., None], torch.full((*source.shape, 1), share))
    end = torch.zeros(recipe.batch, 1, recipe.shape.vocabulary)
    end[..., EOS_ID] = 1.0
    return prompts, torch.cat([target, end], dim=1)


def rate(step: int, steps: int) -> float:
    """Share of the learning rate at `step` (0-based): linear up over RAMP_STEPS, linear down to FINAL_RATE."""
    return min(1.0, (step + 1) / RAMP_STEPS) * max(FINAL_RATE, 1.0 - step / steps)


def write_model(recipe: Recipe, folder: Path, progress: Progress) -> None:
    """Warm up and save config, generation config, BF16 safetensors and tokenizer into the existing `folder`."""
    save(warm_up(recipe, progress), recipe.shape, folder)


def write_config(recipe: Recipe, folder: Path) -> None:
    """Save what `write_model` saves, but the weights."""
    save(build_model(recipe.shape, recipe.seed), recipe.shape, folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()


def save(model: Qwen3ForCausalLM, shape: ModelShape, folder: Path) -> None:
    """The model as Hugging Face files in BF16, with the tokenizer of its shape."""
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    disable_progress_bar()
    model.save_pretrained(folder)
    build_tokenizer(shape.vocabulary).save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
