"""A character-level tokenizer: printable ASCII and the line feed, one token each, in the `tokenizers` format."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
PAD_ID, EOS_ID, UNKNOWN_ID = 0, 1, 2
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))


def build_tokenizer(vocabulary: int) -> Tokenizer:
    """Tokenizer of exactly `vocabulary` tokens; ids that no character needs are special tokens `<reserved_N>`.

    Raises:
        ValueError: `vocabulary` is smaller than the characters and special tokens.
    """
    specials = [PAD, EOS, UNKNOWN]
    needed = len(specials) + len(CHARACTERS)
    if vocabulary < needed:
        raise ValueError(
            f"vocabulary {vocabulary} < {needed} = {len(specials)} special tokens + {len(CHARACTERS)} characters"
        )
    reserved = [f"<reserved_{number}>" for number in range(vocabulary - needed)]
    vocab = {token: number for number, token in enumerate([*specials, *CHARACTERS, *reserved])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in [*specials, *reserved]]
    )
    return tokenizer
