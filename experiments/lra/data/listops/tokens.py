"""From a line of a ListOps file to token ids, and back.

0      padding
1..15  the digits, the four operators and "]", in the order of `listops.NAMES`
16     [CLS], put first if the classifier reads its first position
"""

from __future__ import annotations

from experiments.lra.data.listops.grammar import NAMES, OPERATORS

VOCABULARY = 1 + len(NAMES) + 1

UNKNOWN = 255
LETTERS = {operator.encode(): letter for operator, letter in zip(OPERATORS, (b"a", b"b", b"c", b"d"), strict=True)}


def _ids_by_byte() -> bytes:
    table = bytearray([UNKNOWN] * 256)
    for index, name in enumerate(NAMES):
        single = LETTERS.get(name.encode(), name.encode())
        table[single[0]] = index + 1
    return bytes(table)


IDS_BY_BYTE = _ids_by_byte()


def encode(source: bytes) -> bytes:
    """One byte each, without the parentheses.

    >>> list(encode(b"( ( ( [MAX 3 ) 4 ) ] )"))
    [12, 4, 5, 15]
    """
    if any(letter in source for letter in LETTERS.values()):
        raise ValueError("holds a token that ListOps does not have")
    words = source.count(b" ") + 1 - source.count(b"(") - source.count(b")")
    for operator, letter in LETTERS.items():
        source = source.replace(operator, letter)
    ids = source.translate(IDS_BY_BYTE, b"() ")
    if UNKNOWN in ids or len(ids) != words:
        raise ValueError("holds a token that ListOps does not have")
    return ids


def decode(ids: bytes) -> list[str]:
    """Of ids 1..15.

    >>> decode(bytes([12, 4, 5, 15]))
    ['[MAX', '3', '4', ']']
    """
    return [NAMES[index - 1] for index in ids]
