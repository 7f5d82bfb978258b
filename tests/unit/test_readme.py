import json
import re
from pathlib import Path

from fp8rl_operator.cli import make_parser

ROOT = Path(__file__).resolve().parents[2]


def test_every_path_that_the_readme_names_exists():
    text = (ROOT / "README.md").read_text()
    named = re.findall(r"`((?:operator|workers|tests|crds|deploy|docs)/[\w./-]*)`|\]\(([\w./-]+)\)", text)
    paths = {first or second for first, second in named}
    assert len(paths) > 15
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []


def test_every_link_of_the_package_readmes_leads_somewhere():
    for folder in (ROOT / "operator", ROOT / "workers"):
        links = re.findall(r"\]\(([\w./-]+)\)", (folder / "README.md").read_text())
        assert len(links) > 8
        assert [link for link in links if not (folder / link).exists()] == []


def test_the_readme_names_make_targets_and_commands_that_exist():
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z0-9-]*[a-z0-9])", text)) <= targets
    listed = re.findall(r"^    (\w+) +\S", make_parser().format_help().split("COMMAND\n")[1], re.MULTILINE)
    assert len(listed) >= 5
    assert set(re.findall(r"^    fp8rl (\w+)", text, re.MULTILINE)) == set(listed)


def result(name):
    return json.loads((ROOT / f"tests/bench/results/{name}.json").read_text())


def sync_figures(models):
    dense = models["dense_8b"]
    return [
        f"| 8B weights on one H200, offer to visible | {dense['seconds'] * 1e3:.1f} ms |",
        f"| vLLM's own `ipc` transfer over that, same run | {dense['times_faster_than_vllm_ipc']:.0f} |",
        f"| the 8B engine stands still, 64 sequences running | {dense['engine_stop_seconds'] * 1e3:.1f} ms |",
        f"| the 8B trainer stands still | {dense['trainer_stop_seconds'] * 1e3:.1f} ms |",
        f"| casts; commit; each over a copy's bandwidth | {dense['cast_of_copy']:.2f}; {dense['commit_of_copy']:.2f} |",
    ]


def operator_figures(found):
    ratio = found["seconds_to_children"] / found["bare_apply_seconds"]
    return [
        f"| {found['jobs']:,} jobs at once: seconds to all children, over a bare script's | {found['seconds_to_children']:.0f}; {ratio:.2f} |",
        f"| p99 of a pass; memory of the operator then | {found['pass_p99_seconds']:.2f} s; {found['rss_mib']:.0f} MiB |",
    ]


def expected_figures():
    """The rows of README's table of figures, from the committed results."""
    study, mismatch, overhead = result("reverse_text"), result("mismatch"), result("overhead")
    runs, control = study["runs"], study["learning_rate_0"]
    rewards = ", ".join(f"{run['reward_first']:.2f} to {run['reward_last']:.2f}" for run in runs)
    wires, card = mismatch["wires"], result("reverse_text_h200")["run"]
    return [
        f"| held-out greedy reward, {len(runs)} seeds | {rewards} |",
        f"| the same with learning rate 0 | {control['reward_first']:.2f} to {control['reward_last']:.2f} |",
        f"| seconds from the engines' readiness to the end, slowest seed | {max(r['wall_seconds'] for r in runs):.0f} |",
        f"| mismatch KL, largest step of any seed | {max(r['mismatch_kl_max'] for r in runs):.1e} |",
        f"| mean token entropy, lowest seed | {min(r['entropy_mean'] for r in runs):.2f} nat |",
        f"| mismatch KL of the `blockwise` wire over that of `bf16` | {mismatch['blockwise_to_bf16']:.2f} |",
        f"| mismatch KL, largest step, `channel` wire | {wires['channel']['mismatch_kl_max']:.1e} |",
        f"| bytes on the wire, `blockwise` over `bf16` | {wires['blockwise']['wire_bytes'] / wires['bf16']['wire_bytes']:.2f} |",
        (
            f"| the same manifest on one H200, shared by all | {card['reward_first']:.2f} to {card['reward_last']:.2f}"
            f" in {card['wall_seconds']:.0f} s |"
        ),
        *sync_figures(result("weight_sync_ipc")["models"]),
        *operator_figures(result("operator")),
        f"| memory of `fp8rl run` and orchestrator, without vLLM and trainer | {overhead['memory']['running']['pss_mb']:.0f} MB (PSS) |",
    ]


def test_the_figures_in_the_readme_are_those_of_the_committed_results():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [row for row in expected_figures() if row not in lines] == []


def test_the_committed_results_meet_what_is_asked_of_them():
    study, mismatch, overhead = result("reverse_text"), result("mismatch"), result("overhead")
    assert study["met"]
    assert mismatch["met"]
    assert overhead["memory"]["running"]["pss_mb"] < 150
    assert overhead["help_seconds_p50"] < 0.3
