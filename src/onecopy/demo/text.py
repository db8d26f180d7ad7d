"""Sentences from a small grammar, as numbers of words. Nothing is downloaded."""

from __future__ import annotations

import random

import torch
from torch import Tensor

PHRASES: dict[str, list[str]] = {
    "STORY": ["TIME FOLK ACT and then THEY ACT .", "FOLK ACT because the NOUN was ADJ .", "FOLK ACT near the HERE ."],
    "FOLK": ["the ADJ WHO", "a WHO with a ADJ NOUN", "the WHO and the WHO", "every WHO"],
    "THEY": ["the WHO", "the ADJ WHO", "nobody", "everyone"],
    "ACT": ["DID the ADJ NOUN", "DID a NOUN", "DID a NOUN and DID the NOUN", "WENT to the HERE", "WENT home HOW"],
    "HOW": ["slowly", "quickly", "alone", "together", "in silence", "in the rain", "at dawn", "with a song"],
    "TIME": ["in the morning ,", "one evening ,", "last winter ,", "every summer ,", "at night ,", "long ago ,"],
}
"""The grammar's rules: each name is replaced by one of its phrases."""

LISTS: dict[str, str] = {
    "WHO": "sailor baker fox child miller crow painter cook shepherd doctor queen clockmaker gardener fisher weaver "
    "mouse teacher traveller smith bear singer king hunter ferryman dog juggler goat merchant neighbour",
    "NOUN": "lantern boat kettle map drum ladder key letter blanket bell basket bridge coin cup door feather garden "
    "hat jar mirror needle painting ring rope sail shoe spoon table tower wheel window clock book stone",
    "ADJ": "small bright quiet broken green heavy hidden golden tired clever cold curious famous gentle hungry lost "
    "narrow patient proud red round sleepy silver soft strange tall warm wet wild young wooden",
    "DID": "found mended carried painted sold opened borrowed washed hid followed counted drew moved bought "
    "cleaned dropped forgot kept lifted polished took repaired returned shook stole wrapped",
    "WENT": "walked ran sailed climbed wandered hurried rode danced crept drifted",
    "HERE": "harbour market mill forest valley island village river field castle well crossroads hill cave",
}
"""Words of which a rule chooses one."""

CHOICES = {rule: [phrase.split() for phrase in phrases] for rule, phrases in PHRASES.items()}
CHOICES |= {rule: [[word] for word in words.split()] for rule, words in LISTS.items()}

WORDS = sorted({word for choices in CHOICES.values() for choice in choices for word in choice} - CHOICES.keys())
"""All words of the grammar, and its punctuation."""

NUMBER = {word: number for number, word in enumerate(WORDS)}


def sentence(source: random.Random) -> list[str]:
    """Return the words of one random sentence."""
    waiting, words = ["STORY"], []
    while waiting:
        symbol = waiting.pop()
        if symbol in CHOICES:
            waiting += reversed(source.choice(CHOICES[symbol]))
        else:
            words.append(symbol)
    return words


def batch(seed: int, sequences: int, length: int) -> Tensor:
    """Return the numbers of words of random sentences, one after the other; the same for the same seed."""
    source = random.Random(seed)  # noqa: S311 - not for secrets
    words: list[str] = []
    while len(words) < sequences * length:
        words += sentence(source)
    return torch.tensor([NUMBER[word] for word in words[: sequences * length]]).view(sequences, length)


def as_text(numbers: list[int]) -> str:
    """Return words as a sentence."""
    text = " ".join(WORDS[number] for number in numbers).replace(" ,", ",").replace(" .", ".")
    return text[:1].upper() + text[1:]
