"""One step of the trainer: exactness, independence of the cut into micro-batches, faults."""

from typing import Any

import pytest
import torch
from trainer_kit import make_config, make_module, make_samples, make_trainer, model_config, resolve_for

from fp8rl_workers.errors import NonFiniteError, OutOfMemoryError
from fp8rl_workers.trainer.loop import TorchTrainer


@pytest.mark.parametrize("optimizer", ["adamw", "signsgd"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_stop_and_resume_gives_the_state_of_the_uninterrupted_run_bit_for_bit(optimizer: str, rounding: str) -> None:
    config = make_config(
        optimizer={
            "name": optimizer,
            "learning_rate": 1e-3,
            "schedule": "cosine",
            "warmup_steps": 2,
            "weight_decay": 0.1,
        },
        precision={"recipe": "blockwise", "rounding": rounding},
    )
    whole, first = make_trainer(config), make_trainer(config)
    for step in range(1, 5):
        whole.train(step, make_samples(6, step))
    for step in range(1, 3):
        first.train(step, make_samples(6, step))
    second = make_trainer(config, seed=99)
    second.load_state(first.state())
    for step in range(3, 5):
        second.train(step, make_samples(6, step))
    for name, master in whole.policy.masters.items():
        assert torch.equal(master, second.policy.masters[name]), name
    for a, b in zip(whole.policy.module.parameters(), second.policy.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_cut_into_micro_batches_changes_neither_loss_nor_gradient() -> None:
    def gradients(tokens: int) -> tuple[float, dict[str, torch.Tensor]]:
        trainer = make_trainer(make_config(tokens_per_micro_batch=tokens, precision={"recipe": "bf16"}))
        found: dict[str, torch.Tensor] = {}
        trainer.apply = lambda _step, grads: found.update(grads) or {}  # type: ignore[method-assign, func-returns-value]
        return trainer.train(1, make_samples(12))["loss"], found

    loss, one = gradients(4096)
    split_loss, many = gradients(40)
    assert split_loss == pytest.approx(loss, rel=1e-2)
    for name, gradient in one.items():
        scale = gradient.abs().max()
        assert (many[name] - gradient).abs().max() <= 0.05 * scale, name


def test_training_raises_the_probability_of_what_was_rewarded() -> None:
    trainer = make_trainer(make_config(optimizer={"learning_rate": 3e-3, "grad_clip": 1.0}))
    samples = [sample.model_copy(update={"advantage": 1.0}) for sample in make_samples(4)]
    first = trainer.train(1, samples)
    for step in range(2, 12):
        last = trainer.train(step, samples)
    assert last["importance_ratio"] > 1.5 * first["importance_ratio"]


def test_with_learning_rate_zero_nothing_changes() -> None:
    trainer = make_trainer(make_config(optimizer={"learning_rate": 0.0}))
    before = {name: master.clone() for name, master in trainer.policy.masters.items()}
    trainer.train(1, make_samples(8))
    assert all(torch.equal(master, before[name]) for name, master in trainer.policy.masters.items())


def test_rule_16_without_offload_nothing_but_figures_per_loss_token_goes_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU a copy to it costs nothing, so the calls are counted: `Tensor.cpu`, and `Tensor.to` with a CPU as target."""
    trainer = make_trainer(make_config(offload="none"))
    samples = make_samples(6)
    moved: list[tuple[int, ...]] = []
    plain_cpu, plain_to = torch.Tensor.cpu, torch.Tensor.to

    def cpu(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        moved.append(tuple(tensor.shape))
        return plain_cpu(tensor, *args, **kwargs)

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        targets = [value for value in (*args, *kwargs.values()) if isinstance(value, (str, torch.device))]
        if any(torch.device(value).type == "cpu" for value in targets) and tensor.is_floating_point():
            moved.append(tuple(tensor.shape))
        return plain_to(tensor, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", cpu)
        patch.setattr(torch.Tensor, "to", to)
        metrics = trainer.train(1, samples)
    assert moved
    assert {len(shape) for shape in moved} == {1}
    assert max(shape[0] for shape in moved) <= metrics["loss_tokens"]
    state = trainer.state()["optimizer"]["state"]
    places = {value.device for item in state.values() for value in item.values() if value.dim()}
    assert places == {next(trainer.policy.module.parameters()).device}


def test_padding_and_prompts_reach_no_metric() -> None:
    trainer = make_trainer()
    samples = make_samples(7)
    metrics = trainer.train(1, samples)
    assert metrics["train_tokens"] == sum(len(sample.tokens) for sample in samples)
    assert metrics["loss_tokens"] == sum(map(sum, (sample.loss_mask for sample in samples)))
    assert 0 < metrics["padding_ratio"] < 0.5


def test_kl_to_the_reference_pulls_towards_it() -> None:
    def distance(weight: float) -> float:
        config = make_config(loss={"kl_to_reference": weight}, optimizer={"learning_rate": 3e-3})
        module, reference = make_module(), make_module().to(torch.bfloat16)
        trainer = TorchTrainer(module, reference, model_config(module), config, resolve_for(config, module))
        samples = make_samples(6)
        for step in range(1, 8):
            trainer.train(step, samples)
        start = make_module().state_dict()
        return sum(float((master - start[name]).square().sum()) for name, master in trainer.policy.masters.items())

    assert distance(5.0) < distance(0.0)


def test_a_loss_that_is_not_finite_is_refused_before_the_step_is_taken() -> None:
    trainer = make_trainer()
    before = trainer.policy.masters["model.norm.weight"].clone()
    next(trainer.policy.module.parameters()).data.fill_(float("inf"))
    with pytest.raises(NonFiniteError):
        trainer.train(1, make_samples(4))
    assert torch.equal(trainer.policy.masters["model.norm.weight"], before)
    assert trainer.step == 0


def test_out_of_memory_says_step_peak_and_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer()

    def exhaust(*_: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    monkeypatch.setattr(trainer, "_forward_backward", exhaust)
    words = r"rank 0, step 3: out of memory, peak \d+\.\d GiB, estimated before the start 0\.0 GiB.*tokensPerMicroBatch \(256\)"
    with pytest.raises(OutOfMemoryError, match=words):
        trainer.train(3, make_samples(4))
