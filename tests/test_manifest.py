"""The manifest round-trips, refuses what it does not understand, and keeps to its folder."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.contracts import as_json
from outrider.errors import BundleError
from outrider.manifest import (
    FileEntry,
    GraphEntry,
    KvEntry,
    Manifest,
    RoleEntry,
    Source,
    Timing,
    TokenizerEntry,
    describe_file,
    first_differing_id,
    parse_manifest,
    read_manifest,
    token_map,
    token_map_hash,
    verify,
    write_manifest,
)

CONTENTS = {
    "target/model.onnx": b"graph",
    "target/model.onnx.data": b"weights" * 1000,
    "tokenizer/tokenizer.json": b"{}",
    "tokenizer/chat_template.jinja": b"{{ messages }}",
}


def write_bundle(folder: Path) -> Manifest:
    for name, content in CONTENTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    entries = {name: describe_file(folder / name) for name in CONTENTS}
    graph = GraphEntry(
        backend="onnxruntime",
        unit="cpu",
        profile="inplace",
        files={name: entries[name] for name in ("target/model.onnx", "target/model.onnx.data")},
        widths=None,
        prefill_width=512,
        kv=KvEntry("float32", "BHSD", layers=2, heads=3, head_dim=16),
        max_context=128,
        vocab_size=300,
        recipe="int4",
        via="artifact",
        executed_artifact=True,
    )
    tokenizer = TokenizerEntry(
        hash="0" * 64,
        files={name: entries[name] for name in CONTENTS if name.startswith("tokenizer/")},
        eos_ids=(1, 2),
        bos_id=0,
        add_bos=True,
        chat_template="tokenizer/chat_template.jinja",
    )
    manifest = Manifest(
        tool_version="0.1.0",
        sources=(Source("target", "tiny", None, {"tiny.gguf": "ab"}),),
        roles={"target": RoleEntry((graph,))},
        tokenizer=tokenizer,
        max_context=128,
        device="host",
        quality={"target": {"perplexity": 12.5}},
        timing=Timing("2 cores", {"verify_s": {"1": 0.01}, "draft_s": {}}),
    )
    write_manifest(folder, manifest)
    return manifest


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    write_bundle(tmp_path)
    return tmp_path


def edited(bundle: Path, path: str, value: Any) -> str:
    """The manifest's text with the field at a dotted path replaced; `...` deletes it."""
    raw = json.loads((bundle / "manifest.json").read_text())
    *parents, last = path.split("/")
    at = raw
    for key in parents:
        at = at[int(key)] if isinstance(at, list) else at[key]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return json.dumps(raw)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    manifest = write_bundle(tmp_path)
    assert read_manifest(tmp_path) == manifest
    assert verify(tmp_path) == manifest
    assert verify(tmp_path, full=True) == manifest


def test_no_temporary_file_is_left_and_a_failed_write_keeps_the_old_manifest(bundle: Path) -> None:
    before = (bundle / "manifest.json").read_bytes()
    bad = Manifest(**{**vars(read_manifest(bundle)), "quality": {"target": {"perplexity": float("nan")}}})
    with pytest.raises(BundleError, match="not finite"):
        write_manifest(bundle, bad)
    assert (bundle / "manifest.json").read_bytes() == before
    assert not [name for name in os.listdir(bundle) if name.startswith(".")]


GRAPH = "roles/target/graphs/0"


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("tokenizer/eos_ids", ..., r"tokenizer\.eos_ids is missing"),
        ("max_context", "128", "max_context is '128'; expected a whole number"),
        ("max_context", True, "max_context is True; expected a whole number"),
        ("max_context", 0, "max_context is 0"),
        ("tokenizer/add_bos", 1, r"tokenizer\.add_bos is 1; expected true or false"),
        ("roles", {}, "no 'target'"),
        ("roles/target/graphs", [], r"roles\.target: graphs is empty"),
        (f"{GRAPH}/profile", "fancy", r"graphs\[0\]\.profile is 'fancy'; known: 'inplace'"),
        (f"{GRAPH}/via", "faith", r"graphs\[0\]\.via is 'faith'"),
        (f"{GRAPH}/kv/heads", ..., r"graphs\[0\]\.kv\.heads is missing"),
        (f"{GRAPH}/kv/heads", 0, "heads is 0"),
        (f"{GRAPH}/widths", [0, 4], "widths"),
        (f"{GRAPH}/widths", ["4"], r"widths\[0\] is '4'"),
        (f"{GRAPH}/embedding_file", "e.bin", "'e.bin' is named by the graph"),
        (f"{GRAPH}/surprise", 1, r"graphs\[0\]\.surprise is an unknown field; known: backend"),
        ("timing/machine", None, r"timing\.machine is None; expected a string"),
        ("tokenizer/chat_template", "x.jinja", "chat_template is 'x.jinja'"),
        (f"{GRAPH}/files/target~1model", {"sha256": "zz", "bytes": 1}, "64 lower-case hex digits"),
        ("schema_version", 2, "schema_version is 2, this outrider reads 1"),
        ("schema_version", ..., "schema_version is None"),
        ("schema_version", "1", "schema_version is '1'"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(bundle: Path, path: str, value: Any, field: str) -> None:
    text = edited(bundle, path, value)
    (bundle / "manifest.json").write_text(text)
    with pytest.raises(BundleError, match=field) as caught:
        read_manifest(bundle)
    assert "manifest.json" in str(caught.value)


@pytest.mark.parametrize("cut", [0, 1, 40, -3])
def test_a_manifest_that_is_cut_off_is_a_bundle_error(bundle: Path, cut: int) -> None:
    text = (bundle / "manifest.json").read_text()
    with pytest.raises(BundleError, match="not valid JSON"):
        parse_manifest(text[:cut])


@pytest.mark.parametrize("text", ["[]", "3", '{"schema_version": 1, "schema_version": 1}', "[" * 100_000])
def test_json_of_another_shape_is_a_bundle_error(text: str) -> None:
    with pytest.raises(BundleError):
        parse_manifest(text)


def test_a_folder_without_a_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="does not exist"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "name", ["../out.bin", "/etc/passwd", "a/../../b", "", ".", "a//b", "a\\..\\b", "C:x", "a/./b"]
)
def test_a_path_that_leaves_the_bundle_is_refused(bundle: Path, name: str) -> None:
    entry = as_json(FileEntry("0" * 64, 1))
    raw = json.loads((bundle / "manifest.json").read_text())
    raw["roles"]["target"]["graphs"][0]["files"][name] = entry
    with pytest.raises(BundleError, match="plain relative path"):
        parse_manifest(json.dumps(raw))


def test_a_link_that_leaves_the_bundle_is_refused(
    bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "model.onnx"
    outside.write_bytes(CONTENTS["target/model.onnx"])
    (bundle / "target/model.onnx").unlink()
    (bundle / "target/model.onnx").symlink_to(outside)
    with pytest.raises(BundleError, match=r"'target/model.onnx' is a link that leaves"):
        verify(bundle)


def test_a_missing_file_is_named(bundle: Path) -> None:
    (bundle / "target/model.onnx.data").unlink()
    with pytest.raises(BundleError, match=r"'target/model.onnx.data' is missing"):
        verify(bundle)


def test_a_cut_off_file_is_found_by_its_size(bundle: Path) -> None:
    (bundle / "target/model.onnx.data").write_bytes(b"weights")
    with pytest.raises(BundleError, match=r"model.onnx.data' has 7 bytes, the manifest says 7000"):
        verify(bundle)


def test_a_changed_byte_is_found_by_the_full_check_only(bundle: Path) -> None:
    path = bundle / "target/model.onnx.data"
    path.write_bytes(b"W" + path.read_bytes()[1:])
    verify(bundle)
    with pytest.raises(BundleError, match=r"model.onnx.data' has sha256"):
        verify(bundle, full=True)


def test_progress_of_the_full_check_counts_every_byte(bundle: Path) -> None:
    seen: list[tuple[int, int]] = []
    verify(bundle, full=True, progress=lambda done, total: seen.append((done, total)))
    total = sum(map(len, CONTENTS.values()))
    assert seen[-1] == (total, total)


names = st.text("abcdefg_.0", min_size=1, max_size=8).filter(lambda name: name.strip("."))
files = st.dictionaries(
    names.map("f/{}".format),
    st.just(FileEntry("ab" * 32, 7)),
    min_size=1,
    max_size=3,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(st.text(), json_values, max_size=3)
sizes = st.integers(1, 2**40)
graphs = st.builds(
    GraphEntry,
    backend=st.text(),
    unit=st.text(),
    profile=st.sampled_from(["inplace", "split", "buffer", "state"]),
    files=files,
    widths=st.none() | st.lists(sizes, min_size=1, max_size=4).map(tuple),
    prefill_width=st.none() | sizes,
    kv=st.builds(KvEntry, st.text(), st.text(), sizes, sizes, sizes, st.none() | st.floats(-1, 1)),
    max_context=sizes,
    vocab_size=sizes,
    recipe=st.text(),
    preference=st.integers(),
    hidden_layers=st.lists(sizes, max_size=3).map(tuple),
    functions=st.dictionaries(st.text(), st.text(), max_size=2),
    target_sha256=st.none() | st.text(),
    via=st.none() | st.sampled_from(["artifact", "emulator", "evaluator", "reference-lowering"]),
    executed_artifact=st.booleans(),
    options=objects,
)
manifests = st.builds(
    Manifest,
    tool_version=st.text(),
    sources=st.lists(
        st.builds(Source, st.text(), st.text(), st.none() | st.text(), st.dictionaries(st.text(), st.text())),
        max_size=2,
    ).map(tuple),
    roles=st.builds(lambda g: {"target": RoleEntry(tuple(g))}, st.lists(graphs, min_size=1, max_size=2)),
    tokenizer=st.builds(
        TokenizerEntry,
        hash=st.text(),
        files=st.just({"tokenizer.json": FileEntry("cd" * 32, 9)}),
        eos_ids=st.lists(st.integers(0), max_size=3).map(tuple),
        bos_id=st.none() | st.integers(0),
    ),
    max_context=sizes,
    device=st.text(),
    quality=objects,
    timing=st.none() | st.builds(Timing, st.text(), objects),
)


@settings(max_examples=60, deadline=None)
@given(manifests)
def test_every_manifest_survives_a_round_trip_through_json(manifest: Manifest) -> None:
    assert parse_manifest(json.dumps(as_json(manifest))) == manifest


TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}},
    "added_tokens": [{"id": 3, "content": "<eos>"}],
}


def with_vocab(**tokens: int) -> dict[str, Any]:
    changed = copy.deepcopy(TOKENIZER)
    changed["model"]["vocab"] |= tokens  # type: ignore[index]
    return changed


def test_a_token_map_holds_added_tokens_and_no_padding() -> None:
    padded = with_vocab(**{"[PAD4]": 4, "[PAD5]": 5})
    assert token_map(padded) == {0: "a", 1: "b", 2: "ab", 3: "<eos>"}
    assert token_map_hash(padded) == token_map_hash(TOKENIZER)
    assert first_differing_id(padded, TOKENIZER) is None


def test_the_order_of_a_vocabulary_has_no_part_in_its_hash() -> None:
    turned = copy.deepcopy(TOKENIZER)
    turned["model"]["vocab"] = dict(reversed(TOKENIZER["model"]["vocab"].items()))  # type: ignore[index, attr-defined]
    assert token_map_hash(turned) == token_map_hash(TOKENIZER)


def test_equal_sizes_with_swapped_tokens_are_told_apart_at_the_first_id() -> None:
    swapped = with_vocab(a=1, b=0)
    assert token_map_hash(swapped) != token_map_hash(TOKENIZER)
    assert first_differing_id(TOKENIZER, swapped) == (0, "a", "b")


def test_a_longer_map_with_the_same_beginning_is_no_difference() -> None:
    assert first_differing_id(TOKENIZER, with_vocab(extra=4)) is None
    assert token_map_hash(TOKENIZER) != token_map_hash(with_vocab(extra=4))


def test_a_unigram_vocabulary_is_read_by_position() -> None:
    assert token_map({"model": {"vocab": [["<unk>", 0.0], ["▁a", -1.0]]}}) == {0: "<unk>", 1: "▁a"}
