"""Finds checkpoints: local folders, or models of the Hugging Face hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.errors import InputError, UnavailableError, reason

# The released drafters and the targets they were trained for, from the model table of the official repository.
TARGETS = {
    "Gumiho-vicuna-7b": "lmsys/vicuna-7b-v1.3",
    "Gumiho-vicuna-13b": "lmsys/vicuna-13b-v1.3",
    "Gumiho-llama2-7b": "meta-llama/Llama-2-7b-chat-hf",
    "Gumiho-llama2-13b": "meta-llama/Llama-2-13b-chat-hf",
    "Gumiho-llama2-70b": "meta-llama/Llama-2-70b-chat-hf",
    "Gumiho-llama3-8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "Gumiho-llama3-70b": "meta-llama/Meta-Llama-3-70B-Instruct",
}
WEIGHT_FILES = (
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "model.safetensors",
    "pytorch_model.bin",
)


def target_of(drafter: str) -> str:
    """The target of a released drafter, by the last part of its id or folder name. Raises InputError for others."""
    try:
        return TARGETS[drafter.rstrip("/").rsplit("/", 1)[-1]]
    except KeyError:
        raise InputError(f"'{drafter}' is not one of the released drafters: name its target with --target") from None


def locate(source: str) -> Path:
    """The folder of a checkpoint. A source that is not a local folder is a hub id, which is fetched into the hub's
    cache.

    Raises InputError for a source that does not exist, and UnavailableError if the hub cannot be reached.
    """
    try:
        folder = Path(source).expanduser()
        if folder.is_dir():
            return folder
        exists = folder.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a name that is too long, an unknown user's home
        raise InputError(
            f"'{source[:60]}' cannot be the name of a folder ({reason(error)}): check --ckpt and --target"
        ) from None
    not_found = InputError(
        f"'{source}' is neither a folder nor a hub id of the form owner/name: check --ckpt and --target"
    )
    if exists or source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise not_found
    from huggingface_hub import snapshot_download

    small = ["*.json", "tokenizer*", "*.jinja"]
    with _hub_errors(source, not_found):
        folder = Path(snapshot_download(source, allow_patterns=[*small, "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(source, allow_patterns=[*small, "*.bin", "*.pt"]))
        return folder


def locate_file(source: str) -> Path:
    """A file of a hub model, ``owner/name/file``, which is fetched into the hub's cache. Raises as ``locate``."""
    from huggingface_hub import hf_hub_download

    owner, name, file = source.split("/", 2)
    not_found = InputError(
        f"'{source}' is neither a file nor a hub id with a file, owner/name/file.gguf: check --target"
    )
    with _hub_errors(source, not_found):
        return Path(hf_hub_download(f"{owner}/{name}", file))


@contextmanager
def _hub_errors(source: str, not_found: InputError) -> Iterator[None]:
    """Says what went wrong with fetching ``source``. not_found: raised if it cannot be the name of a model."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    local = "file" if source.count("/") > 1 else "folder"
    try:
        yield
    except HFValidationError:
        raise not_found from None
    except GatedRepoError:
        raise InputError(
            f"the hub requires you to accept the licence of '{source}': accept it there, then run `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise InputError(
            f"the hub has no model '{source}', or it is private: check the name or run `hf auth login`"
        ) from None
    except LocalEntryNotFoundError:
        raise UnavailableError(
            f"'{source}' is not in the local hub cache and the hub cannot be reached: name a local {local}"
        ) from None
    except EntryNotFoundError:
        raise InputError(
            f"the hub's model has no file '{source.split('/', 2)[-1]}': check the last part of '{source}'"
        ) from None
    except Exception as error:  # transport errors (httpx) and those of the hub have no common base class
        raise UnavailableError(
            f"fetching '{source}' from the hub failed ({reason(error)}): try again, or name a local {local}"
        ) from None
