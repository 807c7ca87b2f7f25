"""Where checkpoints come from: local folders, or a model hub."""

from pathlib import Path

from runtime.errors import GumihoError

from .json_config import reason

# The released drafters and the targets they were trained for (reference: the official repository's model table).
TARGETS = {
    "Gumiho-vicuna-7b": "lmsys/vicuna-7b-v1.3",
    "Gumiho-vicuna-13b": "lmsys/vicuna-13b-v1.3",
    "Gumiho-llama2-7b": "meta-llama/Llama-2-7b-chat-hf",
    "Gumiho-llama2-13b": "meta-llama/Llama-2-13b-chat-hf",
    "Gumiho-llama2-70b": "meta-llama/Llama-2-70b-chat-hf",
    "Gumiho-llama3-8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "Gumiho-llama3-70b": "meta-llama/Meta-Llama-3-70B-Instruct",
}
WEIGHT_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json", "model.safetensors", "pytorch_model.bin")


def target_of(drafter: str) -> str:
    """The target a released drafter belongs to, by the last part of its id or folder name."""
    try:
        return TARGETS[drafter.rstrip("/").rsplit("/", 1)[-1]]
    except KeyError:
        raise GumihoError(f"'{drafter}' is not one of the released drafters, so name its target with --target") from None


def locate(source: str) -> Path:
    """A local folder as it is; anything else is taken for a hub id and fetched into the hub's own cache."""
    try:
        folder = Path(source).expanduser()
        if folder.is_dir():
            return folder
        exists = folder.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a name that is too long, an unknown user's home
        raise GumihoError(
            f"'{source[:60]}' cannot be the name of a folder ({reason(error)}): check --ckpt and --target"
        ) from None
    if exists or source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise GumihoError(f"'{source}' is neither a folder nor a hub id of the form owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    small = ["*.json", "tokenizer*", "*.jinja"]
    try:
        folder = Path(snapshot_download(source, allow_patterns=[*small, "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(source, allow_patterns=[*small, "*.bin"]))
        return folder
    except HFValidationError:
        raise GumihoError(f"'{source}' is neither a folder nor a hub id of the form owner/name") from None
    except GatedRepoError:
        raise GumihoError(f"the hub asks to accept the licence of '{source}' first, then log in with `hf auth login`") from None
    except RepositoryNotFoundError:
        raise GumihoError(f"the hub has no model '{source}', or it is private: check the name or run `hf auth login`") from None
    except LocalEntryNotFoundError:
        raise GumihoError(
            f"'{source}' is not in the local hub cache and the hub cannot be reached: name a local folder"
        ) from None
    except Exception as error:  # the hub's transport errors (httpx) share no base class with its own
        raise GumihoError(
            f"fetching '{source}' from the hub failed ({reason(error)}): try again, or name a local folder"
        ) from None
