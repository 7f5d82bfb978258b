"""What a process reads from its environment before anything else."""

from pathlib import Path

import pytest

from fp8rl_workers.config import PodEnvironment
from fp8rl_workers.errors import InvalidInputError


def environ(token: Path) -> dict[str, str]:
    return {
        "FP8RL_CONFIG": "/config.json",
        "FP8RL_TOKEN_FILE": str(token),
        "FP8RL_POD_NAME": "trainer-0",
        "FP8RL_POD_UID": "uid",
        "FP8RL_POD_IP": "127.0.0.1",
        "FP8RL_STATE_DIR": "/state",
    }


def test_an_empty_token_is_refused_because_it_would_open_every_route(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(" \n")
    with pytest.raises(InvalidInputError, match=f"FP8RL_TOKEN_FILE: {file} is empty"):
        PodEnvironment.read(environ(file))
    file.write_text("secret\n")
    assert (PodEnvironment.read(environ(file)).token, PodEnvironment.read(environ(file)).attempt) == ("secret", 0)
