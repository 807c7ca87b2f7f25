"""Several texts at once over one set of weights, with asyncio: python examples/streams.py BUNDLE [PROMPT ...]"""

import asyncio
import sys

from runtime import GumihoError, Stream, load


async def text(stream: Stream, prompt: str) -> str:
    return "".join([piece async for piece in stream.agenerate(prompt, max_new_tokens=32)])


async def main(bundle: str, prompts: list[str]) -> None:
    with load(bundle, streams=len(prompts)) as model:
        texts = await asyncio.gather(*(text(*pair) for pair in zip(model.streams, prompts, strict=True)))
    for prompt, continuation in zip(prompts, texts, strict=True):
        print(f"{prompt!r} {continuation!r}")


if len(sys.argv) < 2:
    sys.exit(__doc__)
try:
    asyncio.run(main(sys.argv[1], sys.argv[2:] or ["import ", "def main():"]))
except GumihoError as error:
    sys.exit(f"error: {error}")
