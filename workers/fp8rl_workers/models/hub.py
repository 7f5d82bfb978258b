"""Models and prompts of a Hugging Face hub. The token is read from HF_TOKEN by huggingface_hub itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from fp8rl_workers.errors import InvalidInputError, InvalidModelError, WorkerError

TOO_MANY_REQUESTS = 429
PATTERNS = ["*.json", "*.txt", "*.jinja", "*.model", "*.py"]
WEIGHTS = "*.safetensors"


class HubUnavailableError(WorkerError):
    """Raised when the hub does not answer or is overloaded: another try may help."""

    reason = "HubUnavailable"
    status = 503


def resolve_revision(repository: str, revision: str | None) -> str:
    """Commit hash of `revision` (branch, tag or commit; None: the default branch), so that a cached folder never changes.

    Raises:
        InvalidModelError: the hub has no such repository or revision, or wants (another) token.
        HubUnavailableError: it does not answer.
    """
    from huggingface_hub import HfApi

    with _model_errors(repository, revision):
        commit = HfApi().model_info(repository, revision=revision).sha
    if commit is None:
        raise InvalidModelError(f"model.source.hub.repository: {repository} has no commit; name another repository")
    return commit


def download(repository: str, commit: str, folder: Path, *, weights: bool) -> None:
    """Fetch config, tokenizer and, with `weights`, safetensors of `commit` into `folder`.

    Raises:
        InvalidModelError, HubUnavailableError: as in resolve_revision.
    """
    from huggingface_hub import snapshot_download

    with _model_errors(repository, commit):
        patterns = [*PATTERNS, *([WEIGHTS] if weights else [])]
        snapshot_download(repository, revision=commit, local_dir=folder, allow_patterns=patterns)


def list_dataset(repository: str, revision: str | None) -> tuple[str, list[str]]:
    """(commit hash of `revision`, paths of the files of that commit) of a data set's repository.

    Raises:
        InvalidInputError: the hub has no such repository or revision, or wants (another) token.
        HubUnavailableError: it does not answer.
    """
    from huggingface_hub import HfApi

    with _dataset_errors(repository, revision):
        info = HfApi().dataset_info(repository, revision=revision)
    if info.sha is None:
        raise InvalidInputError(f"rollout.dataset.hub.repository: {repository} has no commit; name another repository")
    return info.sha, [file.rfilename for file in info.siblings or []]


def download_dataset(repository: str, commit: str, names: list[str], folder: Path) -> list[Path]:
    """Fetch files of a data set's repository into `folder`; their paths, in the order of `names`.

    Raises:
        InvalidInputError, HubUnavailableError: as in list_dataset.
    """
    from huggingface_hub import hf_hub_download

    with _dataset_errors(repository, commit):
        return [
            Path(hf_hub_download(repository, name, repo_type="dataset", revision=commit, local_dir=folder))
            for name in names
        ]


def _model_errors(repository: str, revision: str | None) -> AbstractContextManager[None]:
    return _hub_errors("model.source.hub", repository, revision, InvalidModelError, "source.pvc or source.hostPath")


def _dataset_errors(repository: str, revision: str | None) -> AbstractContextManager[None]:
    return _hub_errors("rollout.dataset.hub", repository, revision, InvalidInputError, "dataset.volume")


@contextmanager
def _hub_errors(
    field: str, repository: str, revision: str | None, refused: type[WorkerError], instead: str
) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError

    # Its first base is the error class of the hub client's own HTTP library, which also covers refused connections.
    transport_error: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        yield
    except (transport_error, OSError, ValueError) as error:
        kind = refused if _is_final(error) else HubUnavailableError
        raise kind(
            f"{field}: cannot fetch {repository} at revision {revision or 'default'}: {type(error).__name__}: {' '.join(str(error).split())};"
            f" check repository, revision, the secret's token and the network, or use {instead}"
        ) from error


def _is_final(error: Exception) -> bool:
    """Whether asking again would end the same way: a malformed name, or a refusal by the hub."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is None:
        return isinstance(error, ValueError)
    return 400 <= int(status) < 500 and int(status) != TOO_MANY_REQUESTS
