"""Recipes: names, text forms, overrides, refusals, and the report of a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.errors import ExportError, UsageError
from outrider.quantize.calibration import GPTQ_INPUTS, calibrated_scheme, needed_moment
from outrider.quantize.pack import pack
from outrider.quantize.recipes import (
    RECIPES,
    check_overrides,
    check_role,
    format_scheme,
    get_recipe,
    parse_overrides,
    parse_scheme,
    with_overrides,
)
from outrider.quantize.report import SlotReport, check_changed, describe
from outrider.quantize.schemes import AnyScheme, BlockInt, Carry, DynamicInt8, Float, RawBlocks, Recipe


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


SLOTS = ["embedding", *(f"layers.{n}.{part}" for n in range(2) for part in ("qkv", "down")), "head"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "layers.*.dwn=int8",
            r"'layers\.\*\.dwn' matches no slot of the draft.*Did you mean layers\.\*\.down",
        ),
        ("head=fp16, heads=int8", r"'heads' matches no slot.*which has embedding, .*Did you mean head\?"),
        ("layers.7.qkv=int8", r"'layers\.7\.qkv' matches no slot"),
        ("emb*=int8-dynamic", "a lookup has no activation"),
    ],
)
def test_an_override_without_effect_is_refused_with_near_names(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_overrides(parse_overrides(text), SLOTS, "draft")


def test_an_override_with_an_effect_is_let_through() -> None:
    check_overrides(parse_overrides("layers.1.*=int8, head=int8-dynamic"), SLOTS, "draft")


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


def report_of(slot: str, scheme: AnyScheme, raw: list[RawBlocks] | None = None, **options: Any) -> SlotReport:
    """The report of a random weight under a scheme, with the statistics that `stats` names."""
    weight = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    asked = options.pop("asked", scheme)
    return describe(slot, weight, pack(weight, scheme, raw=raw, **options), asked, raw, "stats" in options)


def test_the_report_names_type_bytes_and_error_of_a_weight() -> None:
    recipe = Recipe("mine", BlockInt(4, 32), Float(), BlockInt(8))
    qkv, head = (report_of(slot, recipe.scheme_for(slot)) for slot in ("layers.0.qkv", "head"))
    check_changed([qkv, head], recipe)
    assert (qkv.slot, qkv.before, qkv.after) == ("layers.0.qkv", "float32", "int4-b32")
    assert (qkv.bytes_before, qkv.bytes_after) == (32 * 64 * 4, 32 * 64 // 2 + 32 * 2 * 4)
    assert 0.02 < qkv.relative_error < 0.12
    assert qkv.reason == "quantized"
    assert head.after == "fp32"
    assert "recipe says so" in head.reason


def test_the_report_says_what_was_calibrated_and_what_gave_way() -> None:
    ones = np.ones(64, np.float32)
    assert report_of("s", BlockInt(4, method="mse"), stats=ones).reason == "quantized; calibrated"
    assert report_of("s", BlockInt(4), stats=ones).reason == "quantized"  # round to nearest reads none
    fallen = report_of("s", BlockInt(4, method="mse"), asked=BlockInt(4, method="gptq"))
    assert "at most 4096 inputs" in fallen.reason


def test_a_source_in_other_blocks_is_reported_as_rounded_twice() -> None:
    raw = [RawBlocks("Q4_1", (32, 64), np.zeros((32, 40), np.uint8))]
    report = report_of("s", BlockInt(4, 64), raw)
    assert (report.before, report.bytes_before) == ("Q4_1", 32 * 40)
    assert report.reason == "rounded a second time: int4-b64 cannot hold these blocks"


def test_a_recipe_that_changed_nothing_is_an_error() -> None:
    recipe = Recipe("mine", Float(), Float(), BlockInt(8))
    reports = [report_of(slot, recipe.scheme_for(slot)) for slot in ("layers.0.qkv", "head")]
    with pytest.raises(ExportError, match="quantized none of 2"):
        check_changed(reports, recipe)
    check_changed(reports, get_recipe("fp32"))


WIDE = GPTQ_INPUTS + 1


def test_gptq_gives_way_to_mse_where_inputs_cannot_be_calibrated() -> None:
    gptq, mse = BlockInt(4, 64, method="gptq"), BlockInt(4, 64, method="mse")
    assert calibrated_scheme(gptq, GPTQ_INPUTS) == gptq
    assert calibrated_scheme(gptq, WIDE) == calibrated_scheme(gptq, None) == mse
    assert calibrated_scheme(Carry(gptq), WIDE) == Carry(mse)
    for other in (BlockInt(4, 64, method="hqq"), Float(), DynamicInt8()):
        assert calibrated_scheme(other, WIDE) == other


@pytest.mark.parametrize(
    ("scheme", "types", "moment"),
    [
        (BlockInt(4, 32, method="gptq"), [], "full"),
        (BlockInt(4, 32, method="gptq"), ["Q4_1"], "full"),
        (BlockInt(4, 32, method="gptq"), ["Q4_0"], None),
        (BlockInt(4, 32, method="mse"), [], "diagonal"),
        (BlockInt(4, 32, method="mse"), ["Q4_0", "Q4_0"], None),
        (BlockInt(4, 64, method="mse"), ["Q4_0"], "diagonal"),
        (BlockInt(4, 32), [], None),
        (BlockInt(4, 32, method="hqq"), [], None),
        (Carry(BlockInt(4, 32, method="mse")), [], "diagonal"),
        (Carry(BlockInt(4, 32, method="mse")), ["Q4_1"], None),
        (Carry(BlockInt(4, 32, method="mse"), wide="round"), ["Q6_K"], None),
        (Float(), [], None),
        (DynamicInt8(), [], None),
    ],
)
def test_moments_are_asked_for_where_packing_uses_them(scheme: Any, types: list[str], moment: Any) -> None:
    assert needed_moment(scheme, types) == moment
