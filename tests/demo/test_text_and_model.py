"""The sentences and the model of the demo."""

from __future__ import annotations

import random
import re

import torch
from torch import nn

from onecopy.demo import text
from onecopy.demo.model import SmallGPT


def test_sentences_are_words_of_the_grammar_and_repeat_with_the_seed() -> None:
    words = text.sentence(random.Random(1))
    assert words == text.sentence(random.Random(1)) != text.sentence(random.Random(2))
    assert words[-1] == "."
    assert set(words) <= set(text.WORDS)
    assert not any(word.isupper() for word in text.WORDS), "a rule is missing"
    shown = text.as_text([text.NUMBER[word] for word in words])
    assert re.fullmatch(r"[A-Z][a-z ,]+\.", shown)


def test_a_batch_has_its_shape_and_other_seeds_give_other_words() -> None:
    one, again, other = text.batch(1, 3, 20), text.batch(1, 3, 20), text.batch(2, 3, 20)
    assert one.shape == (3, 20)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_word_depends_on_the_words_before_it_only() -> None:
    torch.manual_seed(0)
    model = SmallGPT(len(text.WORDS), 16, 32, 2)
    words = text.batch(0, 1, 16)
    changed = words.clone()
    changed[0, 10:] = 0
    before, after = model(words), model(changed)
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.equal(before[0, 10:], after[0, 10:])


def test_it_learns_and_writes() -> None:
    torch.manual_seed(0)
    model = SmallGPT(len(text.WORDS), 16, 32, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(30):
        words = text.batch(step, 8, 17)
        loss = nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    written = model.write(12, text.NUMBER["."])
    assert 1 <= len(written) <= 12
    assert text.NUMBER["."] not in written[:-1]
