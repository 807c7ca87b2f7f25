"""SentencePiece's byte-pair encoding (google/sentencepiece, src/bpe_model.cc) as a tokenizer of the tokenizers
library."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from runtime.errors import InputError, UnavailableError

from .json_config import shown
from .special_tokens import Kind, add_special

_SPACE = "\u2581"  # stands for a space within pieces


@dataclass(frozen=True)
class Pieces:
    """A vocabulary, by token id.

    prefix: whether a text begins with a space. again: whether what follows a special token then does too. trims:
    whether several spaces become one, and those at the ends of a text none. charsmap: SentencePiece's compiled rules of
    replacing characters; empty for none. strips: as ``add_special``.
    """

    texts: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    prefix: bool = True
    trims: bool = False
    charsmap: bytes = b""
    strips: Collection[str] = ()
    again: bool = True


def tokenizer_of(pieces: Pieces) -> Tokenizer:
    """The tokenizer, without tokens before or after a text.

    SentencePiece joins the pair whose piece has the highest score, the leftmost of several. Here every pair of pieces
    that form a piece is a merge, in that order; longer left sides go first, as the leftmost of overlapping pairs do. So
    no two pieces that pairs form may have the same score: raises InputError.
    """
    ids = {text: i for i, text in enumerate(pieces.texts)}
    joined = {text: i for text, i in ids.items() if pieces.kinds[i] in (Kind.NORMAL, Kind.USER_DEFINED, Kind.UNUSED)}
    merges = [
        (-pieces.scores[i], i, -at, text[:at], text[at:])
        for text, i in joined.items()
        if pieces.kinds[i] == Kind.NORMAL
        for at in range(1, len(text))
        if text[:at] in joined and text[at:] in joined
    ]
    merges.sort()
    for (score, first, *_), (other, second, *_) in pairwise(merges):
        if first != second and not score < other:
            raise InputError(
                f"the tokenizer gives {shown(pieces.texts[first])} and {shown(pieces.texts[second])} the same score, "
                "so that a text decides which is made first, which is not supported: convert the model again, or name "
                "another target"
            )
    unknown = next((text for text, i in ids.items() if pieces.kinds[i] == Kind.UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            ids,
            [merge[3:] for merge in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=Kind.BYTE in pieces.kinds,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [
            *([normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []),
            *([normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")] if pieces.trims else []),
            *([normalizers.Prepend(_SPACE)] if pieces.prefix and pieces.again else []),
            normalizers.Replace(" ", _SPACE),
        ]
    )
    if pieces.prefix and not pieces.again:  # the first step sees no space, so that it puts one before every text
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(to, scheme, split=False) for to, scheme in ((" ", "first"), (_SPACE, "never"))]
        )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if pieces.prefix else []),
        ]
    )
    add_special(tokenizer, pieces.texts, pieces.kinds, pieces.strips)
    return tokenizer


def read(file: Path) -> Pieces:
    """The vocabulary in a ``tokenizer.model``. Raises InputError if it is none of byte pairs, and UnavailableError
    without the package sentencepiece."""
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2 as protobuf
    except ImportError:
        raise UnavailableError(
            f"reading '{file}' needs the package sentencepiece: pip install sentencepiece protobuf"
        ) from None
    model = protobuf.ModelProto()
    try:
        model.ParseFromString(file.read_bytes())
    except DecodeError:
        model.Clear()
    if not model.pieces or model.trainer_spec.model_type != protobuf.TrainerSpec.BPE:
        raise InputError(
            f"'{file}' is no SentencePiece model of byte pairs: put the model's tokenizer.json into its folder, as "
            "transformers saves it"
        )
    texts, scores, kinds = zip(*((piece.piece, piece.score, piece.type) for piece in model.pieces), strict=True)
    rules = model.normalizer_spec
    return Pieces(
        texts, scores, kinds, rules.add_dummy_prefix, rules.remove_extra_whitespaces, rules.precompiled_charsmap
    )
