"""The builtin model: tokenizer, recipe, two real warm-up steps, and the folder that they end in."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given as for_all
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp8rl_operator.spec.model import BUILTIN_MODELS
from fp8rl_workers.models.folder import missing_files
from fp8rl_workers.models.recipe import RECIPES, ModelShape, Recipe
from fp8rl_workers.models.tokenizer import CHARACTERS, EOS_ID, build_tokenizer
from fp8rl_workers.models.warmup import batch, rate, write_model

TINY = Recipe(steps=2, drill_steps=1, batch=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_model(TINY, path, lambda _: None)
    return path


@for_all(st.text(alphabet=CHARACTERS))
def test_every_text_of_printable_characters_survives_the_tokenizer_one_token_a_character(text):
    tokenizer = build_tokenizer(128)
    ids = tokenizer.encode(text).ids
    assert (len(ids), tokenizer.decode(ids)) == (len(text), text)


def test_the_end_token_is_read_from_its_spelling_and_left_out_of_decoded_text():
    tokenizer = build_tokenizer(128)
    assert tokenizer.encode("ab<eos>").ids[-1] == EOS_ID
    assert tokenizer.decode([*tokenizer.encode("ab").ids, EOS_ID, 127]) == "ab"
    assert tokenizer.get_vocab_size() == 128


def test_a_vocabulary_without_room_for_the_characters_is_refused():
    with pytest.raises(ValueError, match="vocabulary 98 < 99 = 3 special tokens \\+ 96 characters"):
        build_tokenizer(98)


def test_dimensions_that_blockwise_fp8_cannot_take_are_refused_with_the_arithmetic():
    with pytest.raises(ValidationError, match=r"hidden 192 % 128 = 64, kv_heads\*head_dim 64 % 128 = 64"):
        ModelShape(hidden=192, kv_heads=1)


def test_recipes_that_cannot_be_trained_are_refused():
    with pytest.raises(ValidationError, match=r"copy_share 0\.9 \+ reverse_share 0\.35 > 1"):
        Recipe(copy_share=0.9)
    with pytest.raises(ValidationError, match="one length is needed, got 8 to 9"):
        Recipe(task={"max_length": 9})


@pytest.mark.parametrize("change", [{"seed": 1}, {"steps": 301}, {"shape": ModelShape(layers=3)}, {"revision": 2}])
def test_any_change_of_the_recipe_names_another_folder(change):
    recipe = RECIPES["reverse-text-tiny"]
    assert recipe.digest() == Recipe().digest()
    assert Recipe(**change).digest() != recipe.digest()


def test_the_spec_offers_exactly_the_models_that_have_a_recipe():
    assert set(RECIPES) == set(BUILTIN_MODELS)


def test_targets_mix_copy_reverse_and_the_alphabet_and_end_with_the_end_token():
    tokenizer = build_tokenizer(128)
    prompts, targets = batch(TINY, tokenizer, 1)
    text = TINY.task.example(0, 4, "train").answer[::-1]
    assert tokenizer.decode(prompts[0].tolist()) == f"<{text}>"
    assert (prompts.shape, targets.shape) == ((4, 10), (4, 9, 128))
    torch.testing.assert_close(targets.sum(-1), torch.ones(4, 9))
    copied, reversed_ = tokenizer.token_to_id(text[0]), tokenizer.token_to_id(text[-1])
    assert text[0] != text[-1]
    assert targets[0, 0, copied].item() == pytest.approx(0.5 + 0.15 / 26, abs=1e-6)
    assert targets[0, 0, reversed_].item() == pytest.approx(0.35 + 0.15 / 26, abs=1e-6)
    assert targets[0, 8, EOS_ID].item() == 1.0


def test_the_first_steps_drill_the_reverse():
    assert [TINY.shares(step) for step in (0, 1)] == [(0.2, 0.7), (0.5, 0.35)]


def test_the_learning_rate_ramps_up_over_30_steps_and_down_to_2_percent():
    assert [rate(step, 250) for step in (0, 249)] == [1 / 30, 0.02]
    assert rate(29, 250) == pytest.approx(1 - 29 / 250)


def test_the_folder_is_a_complete_bf16_model_that_transformers_loads(folder):
    assert missing_files(folder) == []
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.config.model_type, model.generation_config.eos_token_id) == ("qwen3", EOS_ID)


def test_transformers_and_tokenizers_read_the_same_tokens(folder):
    text = "<abc> 12+7=\n[~]"
    assert AutoTokenizer.from_pretrained(folder).encode(text) == build_tokenizer(128).encode(text).ids


def test_the_same_recipe_gives_the_same_bytes_and_another_seed_others(folder, tmp_path):
    for name, recipe in (("again", TINY), ("other", TINY.model_copy(update={"seed": 1}))):
        (tmp_path / name).mkdir()
        write_model(recipe, tmp_path / name, lambda _: None)
    weights = (folder / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights


def test_progress_names_step_and_loss(tmp_path):
    lines = []
    write_model(TINY, tmp_path, lines.append)
    assert len(lines) == 1
    assert lines[0].startswith("reverse-text-tiny: warm-up step 2/2, loss ")


def test_warming_up_leaves_the_global_generator_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    write_model(TINY, tmp_path, lambda _: None)
    assert torch.equal(torch.rand(1), expected)


def test_the_generation_config_ends_completions_at_the_end_token(folder):
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == EOS_ID
