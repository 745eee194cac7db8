"""Recipes: names, text and JSON forms, overrides, refusals, and the report of a run."""

from __future__ import annotations

import json

import numpy as np
import pytest

from outrider.errors import ExportError, UsageError
from outrider.quantize.recipes import (
    RECIPES,
    check_role,
    format_scheme,
    get_recipe,
    parse_overrides,
    parse_scheme,
    recipe_from_json,
    recipe_to_json,
    with_overrides,
)
from outrider.quantize.report import check_changed, quantize_slots
from outrider.quantize.schemes import BlockInt, Carry, DynamicInt8, Float, Recipe


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_json(name: str) -> None:
    recipe = get_recipe(name)
    assert recipe.name == name
    assert recipe_from_json(json.loads(json.dumps(recipe_to_json(recipe)))) == recipe


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_embeds_in_eight_bits_or_float(name: str) -> None:
    scheme = get_recipe(name).embedding
    if isinstance(scheme, Carry):
        scheme = scheme.otherwise
    assert isinstance(scheme, Float) or (isinstance(scheme, BlockInt) and scheme.bits == 8)


def test_an_unknown_name_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"known: fp32, .*Did you mean 'int4-b128'"):
        get_recipe("int4-b12")


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("fp32", Float()),
        ("fp16", Float("float16")),
        ("int8-dynamic", DynamicInt8()),
        ("carry", Carry()),
        ("int4", BlockInt(4, 32)),
        ("int8-b128", BlockInt(8, 128)),
        ("int4-b64-hqq-asym", BlockInt(4, 64, False, "hqq")),
        ("int4-b16-gptq-level1", BlockInt(4, 16, method="gptq", accuracy_level=1)),
    ],
)
def test_schemes_have_a_text_form(text: str, scheme: object) -> None:
    assert parse_scheme(text) == scheme
    assert parse_scheme(format_scheme(parse_scheme(text))) == scheme


@pytest.mark.parametrize("text", ["int5", "int4-b48", "int4-fast", "", "int4-", "INT4", "fp64", "int4-blue"])
def test_texts_that_name_no_scheme_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_scheme(text)


def test_overrides_win_in_order() -> None:
    recipe = with_overrides(get_recipe("int4"), parse_overrides("layers.0.*=fp16, layers.*.down=int8-b128"))
    assert recipe.scheme_for("layers.0.down") == Float("float16")
    assert recipe.scheme_for("layers.3.down") == BlockInt(8, 128)
    assert recipe.scheme_for("layers.3.qkv") == get_recipe("int4").scheme_for("layers.3.qkv")
    assert with_overrides(recipe, parse_overrides("")) == recipe
    with pytest.raises(UsageError, match="pattern=scheme"):
        parse_overrides("layers.*.down")


def test_a_target_may_not_scale_activations_per_forward() -> None:
    check_role(get_recipe("int8-dynamic"), "draft")
    check_role(get_recipe("int8"), "target")
    with pytest.raises(UsageError, match="drafts only"):
        check_role(get_recipe("int8-dynamic"), "target")
    with pytest.raises(UsageError, match="drafts only"):
        check_role(with_overrides(get_recipe("int8"), (("head", DynamicInt8()),)), "target")


@pytest.mark.parametrize("damage", [{}, {"name": "x"}, {"linear": {"kind": "float", "bits": 3}}])
def test_damaged_json_is_refused(damage: dict[str, object]) -> None:
    value = {**recipe_to_json(get_recipe("int4")), **damage} if damage else {}
    if damage == {"name": "x"}:
        value["head"] = {"kind": "ternary"}
    with pytest.raises(UsageError):
        recipe_from_json(value)


def slots() -> list[tuple[str, np.ndarray, None]]:
    rng = np.random.default_rng(0)
    return [
        (name, rng.standard_normal((32, 64)).astype(np.float32), None) for name in ("layers.0.qkv", "head")
    ]


def test_the_report_names_type_bytes_and_error_of_every_slot() -> None:
    recipe = Recipe("mine", BlockInt(4, 32), Float(), BlockInt(8))
    reports = [report for _, report in quantize_slots(slots(), recipe)]
    check_changed(reports, recipe)
    qkv, head = reports
    assert (qkv.slot, qkv.before, qkv.after) == ("layers.0.qkv", "float32", "int4-b32")
    assert (qkv.bytes_before, qkv.bytes_after) == (32 * 64 * 4, 32 * 64 // 2 + 32 * 2 * 4)
    assert 0.02 < qkv.relative_error < 0.12
    assert head.after == "fp32"
    assert "recipe says so" in head.reason


def test_a_recipe_that_changed_nothing_is_an_error() -> None:
    recipe = Recipe("mine", Float(), Float(), BlockInt(8))
    reports = [report for _, report in quantize_slots(slots(), recipe)]
    with pytest.raises(ExportError, match="quantized none of 2"):
        check_changed(reports, recipe)
    check_changed(reports, get_recipe("fp32"))
