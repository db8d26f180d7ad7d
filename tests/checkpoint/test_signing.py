"""Signed checkpoints: a load with the key refuses everything that was not signed with it."""

from __future__ import annotations

import json
import logging
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from onecopy.checkpoint import SigningKey, load, manifest, save, verify
from onecopy.errors import CheckpointError, CorruptCheckpointError
from tests.support.checkpoints import load_side, make, model_of, push, save_side
from tests.support.harness import distributed
from tests.support.hostile import NAME, Pair, reseal
from tests.support.models import assert_same_tree

SECRET = b"a secret of more than 16 bytes"
KEY = SigningKey(SECRET)


@pytest.fixture
def signed(tmp_path: Path) -> Path:
    pair = Pair()
    pair.step()
    return pair.save(tmp_path, 1, key=KEY)


def test_a_signed_checkpoint_loads_with_the_key_and_without(signed: Path) -> None:
    pair, other = Pair(1), Pair(2)
    pair.load(signed, key=KEY)
    other.load(signed)
    assert all(torch.equal(value, other.tensors()[key]) for key, value in pair.tensors().items())
    assert verify(signed, key=KEY) == verify(signed) == sum(path.stat().st_size for path in signed.iterdir())


def test_another_key_is_refused(signed: Path) -> None:
    for action in (lambda key: load(signed, key=key), lambda key: verify(signed, key=key)):
        with pytest.raises(CorruptCheckpointError, match="was changed after it was signed, or was signed with another"):
            action(SigningKey(b"another secret of 16 bytes"))


def test_a_checkpoint_that_is_not_signed_is_refused_with_a_key(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json is not signed, and a key was given"):
        load(path, key=KEY)


def test_the_newest_with_a_right_signature_is_loaded(signed: Path, caplog: pytest.LogCaptureFixture) -> None:
    """So an older signed checkpoint can be put in the place of a newer one: the docs say so."""
    save(signed.parent, 2)
    with caplog.at_level(logging.WARNING):
        assert Pair().load(signed.parent, key=KEY).step == 1
    assert "step-00000002/manifest.json is not signed" in caplog.text


def test_a_manifest_that_was_changed_is_refused_though_its_checksum_is_right(signed: Path) -> None:
    reseal(signed, lambda content: content.update(step=7))
    assert load(signed).step == 7
    with pytest.raises(CorruptCheckpointError, match="was changed after it was signed"):
        load(signed, key=KEY)


def test_a_signature_is_not_taken_from_another_manifest(signed: Path) -> None:
    other = save(signed.parent, 2, key=KEY)
    mac = json.loads((other / "manifest.json").read_bytes())["hmac"]
    reseal(signed, lambda content: content.update(hmac=mac))
    with pytest.raises(CorruptCheckpointError, match="was changed after it was signed"):
        load(signed, key=KEY)


def change_without_changing_the_checksum(path: Path, offset: int) -> None:
    """Add a multiple of the polynomial of CRC-32, first bit first."""
    bits = f"1{0x04C11DB7:032b}"
    pattern = sum(1 << position for position, bit in enumerate(bits) if bit == "1")
    content = bytearray(path.read_bytes())
    before = zlib.crc32(content)
    for position, byte in enumerate(pattern.to_bytes(5, "little")):
        content[offset + position] ^= byte
    assert zlib.crc32(content) == before
    path.write_bytes(content)


@pytest.mark.parametrize("place", ["data", "header"])
def test_data_that_was_changed_is_refused_though_its_checksum_is_right(place: str, signed: Path) -> None:
    piece = json.loads((signed / "manifest.json").read_bytes())["tensors"]["model/0.weight"]["pieces"][0]
    change_without_changing_the_checksum(signed / NAME, piece["offset"] + 8 if place == "data" else 40)
    assert verify(signed) > 0, "a checksum is no authentication"
    pair = Pair()
    for action in (lambda: pair.load(signed, key=KEY), lambda: verify(signed, key=KEY)):
        with pytest.raises(CorruptCheckpointError, match="is damaged"):
            action()


def test_a_signed_manifest_without_digests_of_the_data_is_refused(signed: Path) -> None:
    content = manifest.parse((signed / "manifest.json").read_bytes(), "here")
    text = manifest.dump(content).replace(b'"version":1', b'"version":3')
    body = text[len(b'{"crc32":"00000000",') :]
    blank = b'{"crc32":"00000000","hmac":"' + KEY.sign(body) + b'",' + body
    text = blank.replace(b"00000000", b"%08x" % zlib.crc32(blank), 1)
    manifest.parse(text, "here")
    with pytest.raises(CorruptCheckpointError, match="it is signed, but has no digests"):
        manifest.parse(text, "here", KEY)


def test_an_unsigned_checkpoint_is_as_before(tmp_path: Path) -> None:
    content = json.loads((save(tmp_path, 1, extra={"a": torch.ones(2)}) / "manifest.json").read_bytes())
    assert content["version"] == 1
    assert "sha256" not in json.dumps(content)


def test_a_key_is_read_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_bytes(SECRET + b"\n")
    monkeypatch.setenv("ONECOPY_CHECKPOINT_KEY", SECRET.decode())
    path = save(tmp_path / "run", 1, key=SigningKey.from_file(tmp_path / "key"))
    assert load(path, key=SigningKey.from_environment()).step == 1
    with pytest.raises(KeyError, match="the environment variable OTHER has no key"):
        SigningKey.from_environment("OTHER")
    with pytest.raises(FileNotFoundError):
        SigningKey.from_file(tmp_path / "nothing")


def test_no_message_has_the_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(tmp_path, 1)
    texts = [repr(KEY), str(KEY)]
    calls: list[Any] = [
        lambda: load(path, key=KEY),
        lambda: load(path, key=SECRET),  # type: ignore[call-overload]
        lambda: save(tmp_path, 1, key=KEY),
        lambda: save(tmp_path, 1, key=SECRET.decode()),  # type: ignore[arg-type]
        lambda: verify(path, key=SECRET),  # type: ignore[arg-type]
        lambda: SigningKey(SECRET[:10]),
        lambda: SigningKey(SECRET.decode()),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises((CheckpointError, TypeError, ValueError)) as caught:
            call()
        texts.append(f"{caught.value!r} {caught.getrepr(showlocals=False)}")
    texts += [path.read_text() for path in tmp_path.rglob("manifest.json")] + [caplog.text]
    assert not [text for text in texts if SECRET[:10].decode() in text.replace("SECRET", "")]


@distributed(2)
def test_all_ranks_sign_and_check_together(world_size: int, tmp_path: Path) -> None:
    side = make("element")
    push(side, [1])
    path = save_side(tmp_path, 1, side, key=KEY)
    other = make("parameter", 9)
    load_side(tmp_path, other, key=KEY)
    assert_same_tree(model_of(other), model_of(side), "model")
    with pytest.raises(CheckpointError if dist.get_rank() == 1 else RuntimeError, match="signed"):
        load_side(path, other, key=KEY if dist.get_rank() == 0 else SigningKey(b"another secret of 16 bytes"))
    with pytest.raises(RuntimeError, match=r"rank 0: key: given; rank 1: key: None"):
        load_side(path, other, key=KEY if dist.get_rank() == 0 else None)
    load_side(shutil.copytree(path, tmp_path / f"copy-{dist.get_rank()}"), other, key=KEY)
