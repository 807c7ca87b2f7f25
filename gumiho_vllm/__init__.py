"""Gumiho drafters in a released vLLM, as a general plugin (entry point ``vllm.general_plugins``).

    LLM(TARGET, speculative_config={"method": "eagle", "model": FOLDER, "num_speculative_tokens": N})

FOLDER is what ``gumiho export --backend vllm`` writes. vLLM drafts chains, so N is 1 to 2 + the heads of the drafter. A
drafter without heads, such as an EAGLE whose ``fc`` has a bias (vLLM itself ignores that), drafts any number.
"""

RELEASES = ("0.32.0",)  # those of vLLM that this was run with
SERIAL_STEPS = 2
RESIDUAL_BLOCKS = 5  # of a head, after the block that joins two rows


def register() -> None:
    """Teaches vLLM the model type ``gumiho``. vLLM calls this in each of its processes.

    Does nothing in a vLLM that knows the type itself, or without vLLM or torch. In another release than ``RELEASES``,
    loading a Gumiho drafter fails with a sentence that says so; other models are not affected.
    """
    try:
        import vllm
        from transformers import AutoConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        return
    release = vllm.__version__.partition("+")[0]
    if "gumiho" in CONFIG_MAPPING or _knows_gumiho():
        return
    if release not in RELEASES:
        AutoConfig.register("gumiho", _refusal(release), exist_ok=True)
        return
    from .drafter import install

    install()


def _knows_gumiho() -> bool:
    try:
        from vllm.transformers_utils.config import _CONFIG_REGISTRY
    except ImportError:
        return False
    return "gumiho" in _CONFIG_REGISTRY


def _refusal(release: str) -> type:
    from transformers import PretrainedConfig

    class UnknownRelease(PretrainedConfig):
        model_type = "gumiho"

        def __init__(self, **_: object) -> None:
            raise ValueError(
                f"gumiho_vllm was run with vLLM {', '.join(RELEASES)}, and this is {release}: install one of these, or "
                "a vLLM with the method 'gumiho' (pull request 43544)"
            )

    return UnknownRelease
