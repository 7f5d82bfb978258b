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
    targets = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z]+)", text)) <= targets
    listed = re.findall(r"^    (\w+) +\S", make_parser().format_help().split("COMMAND\n")[1], re.MULTILINE)
    assert len(listed) >= 5
    assert set(re.findall(r"^    fp8rl (\w+)", text, re.MULTILINE)) == set(listed)
