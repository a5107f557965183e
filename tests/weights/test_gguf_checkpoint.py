from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize as reference

from tests import assets
from tests.weights.gguf_writing import SIZES, Tensors, random_blocks, tensors, write
from tokenspeed.config import GenerationDefaults, Rope
from tokenspeed.layers.rope import inverse_frequencies
from tokenspeed.types import ConfigError
from tokenspeed.weights.gguf_blocks import BLOCK_FORMATS
from tokenspeed.weights.gguf_checkpoint import GGUFCheckpoint

REFERENCE = Path(__file__).parent.parent / "data" / "reference"
LLAMA, GEMMA = "llama", "gemma3"


def checkpoint(path: Path) -> GGUFCheckpoint:
    return GGUFCheckpoint(path, {})


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write(tmp_path / "llama.gguf")


@pytest.mark.parametrize(
    ("model", "name", "expected"),
    [
        (assets.smollm2, "smollm2", {"architecture": "LlamaForCausalLM", "eos_token_ids": (2,)}),
        (assets.gemma3, "gemma3", {"architecture": "Gemma3ForCausalLM", "eos_token_ids": (1,)}),
        pytest.param(
            assets.qwen25_coder_05b,
            "qwen25c05",
            {"architecture": "Qwen2ForCausalLM", "eos_token_ids": (151645,), "attention_bias": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            assets.qwen25_coder_15b,
            "qwen25c15",
            {"architecture": "Qwen2ForCausalLM", "eos_token_ids": (151645,), "attention_bias": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["smollm2", "gemma3", "qwen25_coder_05b", "qwen25_coder_15b"],
)
def test_real_files_say_what_transformers_reads_from_them(
    model: Callable[[], Path], name: str, expected: dict[str, object]
) -> None:
    config = checkpoint(model()).config
    theirs = json.loads((REFERENCE / f"{name}.json").read_text())["config"]
    assert config.vocab_size == theirs["vocab_size"]
    assert config.hidden_size == theirs["hidden_size"]
    assert config.intermediate_size == theirs["intermediate_size"]
    assert config.num_layers == theirs["num_hidden_layers"]
    assert config.num_heads == theirs["num_attention_heads"]
    assert config.num_kv_heads == theirs["num_key_value_heads"]
    assert config.head_dim == theirs.get("head_dim", theirs["hidden_size"] // theirs["num_attention_heads"])
    assert config.max_position_embeddings == theirs["max_position_embeddings"]
    assert config.rms_norm_eps == theirs["rms_norm_eps"]
    assert config.tie_word_embeddings == theirs["tie_word_embeddings"]
    assert config.bos_token_id == theirs["bos_token_id"]
    ropes = theirs["rope_parameters"]
    assert config.rope == Rope(theta=ropes.get("full_attention", ropes)["rope_theta"])
    for layer in range(config.num_layers):
        local = theirs.get("layer_types", ["full_attention"] * config.num_layers)[layer] == "sliding_attention"
        assert config.window(layer) == (theirs["sliding_window"] if local else None)
        assert config.layer_rope(layer).theta == (
            ropes["sliding_attention"]["rope_theta"] if local else config.rope.theta
        )
    for field, value in expected.items():
        assert config.__dict__[field] == value, field
    assert config.attention_output_bias is False


def test_gemma_switches_of_the_real_file() -> None:
    config = checkpoint(assets.gemma3()).config
    assert config.sliding_windows == (512, 512, 512, 512, 512, None) * 3
    assert config.rope_local == Rope(theta=1e4)
    assert config.attention_scale == 256**-0.5
    assert config.embedding_scale == math.sqrt(640)
    assert config.activation == "gelu_tanh"
    assert (config.qk_norm, config.norm_plus_one, config.sandwich_norms) == (True, True, True)


def test_real_query_rows_are_those_of_transformers() -> None:
    """Three weights of some rows as transformers 5.24 holds them: llama's are permuted in the file, Gemma's are not."""
    name = "model.layers.0.self_attn.q_proj.weight"
    llama, gemma = checkpoint(assets.smollm2()).read(name), checkpoint(assets.gemma3()).read(name)
    assert llama[[1, 32, 33], :3].tolist() == [
        [-0.1591796875, 0.39794921875, -0.0198974609375],
        [-0.1173095703125, -0.1173095703125, -0.19281005859375],
        [-0.06280517578125, 0.1446533203125, 0.00634765625],
    ]
    assert gemma[[1, 32, 33], :3].tolist() == [
        [0.003387451171875, -0.02032470703125, -0.030487060546875],
        [0.06787109375, 0.0169677734375, 0.07635498046875],
        [0.013458251953125, 0.02691650390625, -0.035888671875],
    ]


def _permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key weights of llama."""
    return (
        weights.reshape(heads, 2, len(weights) // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)
    )


def test_llama_projections_and_biases_are_put_back(tmp_path: Path) -> None:
    original, stored = tensors(), tensors()
    for layer, (part, heads) in ((0, ("q", 4)), (0, ("k", 2)), (1, ("q", 4)), (1, ("k", 2))):
        bias = np.arange(heads * 16, dtype=np.float32)
        original[f"blk.{layer}.attn_{part}.bias"] = bias
        stored[f"blk.{layer}.attn_{part}.bias"] = _permuted(bias, heads)
        stored[f"blk.{layer}.attn_{part}.weight"] = _permuted(original[f"blk.{layer}.attn_{part}.weight"], heads)
    read = checkpoint(write(tmp_path / "m.gguf", contents=stored))
    assert read.config.attention_bias
    assert not read.config.attention_output_bias
    for part in "qkv":
        for kind in ("weight", "bias") if part != "v" else ("weight",):
            np.testing.assert_array_equal(
                read.read(f"model.layers.1.self_attn.{part}_proj.{kind}"), original[f"blk.1.attn_{part}.{kind}"]
            )


def test_qwen_projections_stay_as_they_are(tmp_path: Path) -> None:
    contents = tensors()
    read = checkpoint(write(tmp_path / "m.gguf", "qwen3", contents=contents))
    np.testing.assert_array_equal(read.read("model.layers.0.self_attn.q_proj.weight"), contents["blk.0.attn_q.weight"])
    assert (read.config.architecture, read.config.qk_norm, read.config.head_dim) == ("Qwen3ForCausalLM", True, 16)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q6_K"])
def test_packed_projections_are_put_back_like_their_floats(tmp_path: Path, kind: str) -> None:
    type_ = GGMLQuantizationType[kind]
    form = BLOCK_FORMATS[type_]
    raw = random_blocks(type_, form.record, rows=64, blocks=256 // form.size)
    contents = tensors()
    del contents["blk.0.attn_q.weight"]
    read = checkpoint(
        write(
            tmp_path / "m.gguf",
            contents=contents,
            packed={"blk.0.attn_q.weight": (raw, type_)},
            settings={"attention.key_length": 16},
        )
    )
    name = "model.layers.0.self_attn.q_proj.weight"
    packed, weights = read.read_quantized(name), read.read(name)
    assert packed is not None
    restored = packed.values.reshape(64, -1, packed.group_size) * packed.scales[..., None]
    restored = restored if packed.offsets is None else restored + packed.offsets[..., None]
    np.testing.assert_array_equal(restored.reshape(64, 256), weights)
    np.testing.assert_array_equal(_permuted(weights, 4), reference(raw, type_))
    assert read.shape(name) == weights.shape == (64, 256)


def test_floats_are_mapped_and_have_no_packed_form(llama: Path) -> None:
    read = checkpoint(llama)
    weights = read.read("model.layers.0.mlp.down_proj.weight")
    assert not weights.flags.owndata
    assert not weights.flags.writeable
    assert read.read_quantized("model.layers.0.mlp.down_proj.weight") is None
    with pytest.raises(ConfigError, match=r"llama\.gguf has no tensor lm_head\.weight"):
        read.read("lm_head.weight")


def test_names_are_hugging_faces(tmp_path: Path) -> None:
    contents = tensors(tied=False) | {
        "rope_freqs.weight": np.ones(8, np.float32),
        "blk.0.odd.weight": np.ones(4, np.float32),
    }
    read = checkpoint(write(tmp_path / "m.gguf", contents=contents))
    layer = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    layer += ["post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    expected = {f"model.layers.{i}.{name}.weight" for i in range(2) for name in layer}
    expected |= {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert read.names() == expected | {"blk.0.odd.weight"}, "a tensor nobody knows keeps its own name"
    assert not read.config.tie_word_embeddings
    assert read.config.rope == Rope(theta=1e4), "divisors of 1 are no scaling"


def _gemma(tmp_path: Path, contents: Tensors | None = None, **settings: object) -> GGUFCheckpoint:
    own = {"attention.sliding_window": 32, "attention.key_length": 16, "attention.value_length": 16}
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return checkpoint(write(tmp_path / "g.gguf", GEMMA, {**own, **named}, contents))


def test_gemma_norms_lose_the_one_that_the_file_adds(tmp_path: Path) -> None:
    contents = tensors()
    for i in range(2):
        contents |= {
            f"blk.{i}.{name}.weight": np.linspace(0.3, 9, size, dtype=np.float32)
            for name, size in (("attn_q_norm", 16), ("post_attention_norm", 64), ("post_ffw_norm", 64))
        }
    read = _gemma(tmp_path, contents)
    for ours, theirs in (
        ("model.norm", "output_norm"),
        ("model.layers.1.pre_feedforward_layernorm", "blk.1.ffn_norm"),
        ("model.layers.1.post_attention_layernorm", "blk.1.post_attention_norm"),
        ("model.layers.1.post_feedforward_layernorm", "blk.1.post_ffw_norm"),
        ("model.layers.1.self_attn.q_norm", "blk.1.attn_q_norm"),
    ):
        np.testing.assert_array_equal(read.read(f"{ours}.weight"), contents[f"{theirs}.weight"] - np.float32(1))
    np.testing.assert_array_equal(read.read("model.layers.1.mlp.up_proj.weight"), contents["blk.1.ffn_up.weight"])


def test_gemma_settings(tmp_path: Path) -> None:
    config = _gemma(
        tmp_path,
        rope__freq_base=1e6,
        rope__scaling__type="linear",
        rope__scaling__factor=8.0,
        final_logit_softcapping=30.0,
        attention__sliding_window_pattern=2,
    ).config
    assert config.sliding_windows == (32, None)
    assert config.rope == Rope(theta=1e6, type="linear", factor=8.0)
    assert config.rope_local == Rope(theta=1e4)
    assert config.final_soft_cap == 30.0
    assert _gemma(tmp_path, attention__sliding_window_pattern=[False, True]).config.sliding_windows == (None, 32)
    assert _gemma(tmp_path).config.sliding_windows == (32, 32)
    assert _gemma(tmp_path, block_count=62).config.attention_scale == pytest.approx((64 / 4) ** -0.5)
    assert _gemma(tmp_path, attention__scale=0.5).config.attention_scale == pytest.approx(0.5)


def test_mistral_as_llama(tmp_path: Path) -> None:
    plain = checkpoint(write(tmp_path / "m.gguf")).config
    assert (plain.architecture, plain.sliding_windows) == ("LlamaForCausalLM", ())
    windowed = checkpoint(write(tmp_path / "w.gguf", settings={"attention.sliding_window": 48})).config
    assert (windowed.architecture, windowed.sliding_windows) == ("MistralForCausalLM", (48, 48))


def _llama3_divisors(
    theta: float, head_dim: int, factor: float, low: float, high: float, original: float
) -> np.ndarray:
    """As llama.cpp's converter computes them."""
    divisors: list[float] = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        smooth = (original / wavelength - low) / (high - low)
        divisors.append(
            1.0
            if wavelength < original / high
            else factor
            if wavelength > original / low
            else 1 / ((1 - smooth) / factor + smooth)
        )
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(
    ("head_dim", "factor", "low", "high", "original"),
    [(128, 8.0, 1.0, 4.0, 8192), (64, 32.0, 1.0, 4.0, 8192), (128, 16.0, 2.0, 6.0, 4096), (16, 8.0, 1.0, 4.0, 8192)],
    ids=["llama-3.1-8b", "llama-3.2-1b", "other", "tiny"],
)
def test_llama3_scaling_is_found_from_its_divisors(
    tmp_path: Path, head_dim: int, factor: float, low: float, high: float, original: int
) -> None:
    divisors = _llama3_divisors(5e5, head_dim, factor, low, high, original)
    contents = tensors(head_dim=head_dim) | {"rope_freqs.weight": divisors}
    settings = {"rope.freq_base": 5e5, "attention.key_length": head_dim, "rope.dimension_count": head_dim}
    rope = checkpoint(write(tmp_path / "m.gguf", settings=settings, contents=contents)).config.rope
    if low == 1.0:
        expected = Rope(
            theta=5e5,
            type="llama3",
            factor=factor,
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
        assert rope == expected
    frequencies, attention = inverse_frequencies(rope, head_dim)
    plain, _ = inverse_frequencies(Rope(theta=5e5), head_dim)
    assert attention == 1.0
    np.testing.assert_allclose(frequencies, plain / divisors, rtol=1e-4)


def test_divisors_of_another_form_are_refused(tmp_path: Path) -> None:
    contents = tensors() | {"rope_freqs.weight": np.array([1, 5, 2, 7, 1, 1, 3, 8], np.float32)}
    with pytest.raises(ConfigError, match=r"m\.gguf scales RoPE by rope_freqs\.weight in a form other than llama3's"):
        checkpoint(write(tmp_path / "m.gguf", contents=contents))


def test_rope_scalings_in_metadata(tmp_path: Path) -> None:
    def rope(**settings: object) -> Rope:
        named = {f"rope.{key.replace('__', '.')}": value for key, value in settings.items()}
        return checkpoint(write(tmp_path / "m.gguf", "qwen2", settings=named)).config.rope

    assert rope(freq_base=1e6, scaling__type="none") == Rope(theta=1e6)
    assert rope(scaling__type="linear", scaling__factor=4.0) == Rope(theta=1e4, type="linear", factor=4.0)
    assert rope(scale_linear=2.0) == Rope(theta=1e4, type="linear", factor=2.0)
    yarn = rope(scaling__type="yarn", scaling__factor=4.0, scaling__original_context_length=32)
    assert (yarn.type, yarn.factor, yarn.original_max_position_embeddings) == ("yarn", 4.0, 32)
    assert yarn.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    with pytest.raises(ConfigError, match="RoPE scaling 'longrope'; supported are default, linear"):
        rope(scaling__type="longrope")
    with pytest.raises(ConfigError, match=r"yarn_ext_factor=0\.5, which is not supported"):
        rope(scaling__type="yarn", scaling__factor=4.0, scaling__yarn_ext_factor=0.5)


def _vocabulary(*tokens: tuple[str, int], template: bool = True, **ids: int) -> Callable[[GGUFWriter], None]:
    def add(writer: GGUFWriter) -> None:
        writer.add_token_list([text for text, _ in tokens])
        writer.add_token_types([kind for _, kind in tokens])
        if template:
            writer.add_chat_template("{{ messages }}")
        for name, token_id in ids.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)

    return add


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (_vocabulary(("a", 1), ("</s>", 3), eos=1), (1,)),
        (_vocabulary(("<eos>", 3), ("<end_of_turn>", 3), eos=0), (0, 1)),
        (_vocabulary(("<eos>", 3), ("<end_of_turn>", 3), eos=0, template=False), (0,)),
        (_vocabulary(("<eos>", 3), ("<end_of_turn>", 1), eos=0), (0,)),
        (_vocabulary(("<|end_of_text|>", 3), ("<|eot_id|>", 3), ("<|eom_id|>", 3), eos=1, eot=1, eom=2), (1, 2)),
        (_vocabulary(("x", 1)), ()),
    ],
    ids=["eos", "turn", "base", "not control", "llama3", "none"],
)
def test_end_of_sequence_ids(tmp_path: Path, extra: Callable[[GGUFWriter], None], expected: Sequence[int]) -> None:
    assert checkpoint(write(tmp_path / "m.gguf", extra=extra)).config.eos_token_ids == expected


def test_sampling_defaults(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_uint32("general.sampling.top_k", 20)

    assert checkpoint(write(tmp_path / "m.gguf", extra=add)).generation == GenerationDefaults(temperature=0.5, top_k=20)
    assert checkpoint(write(tmp_path / "n.gguf")).generation == GenerationDefaults()


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("mamba", {}, "architecture 'mamba', which is not supported; supported are llama, qwen2, qwen3, gemma3"),
        (LLAMA, {"expert_count": 8}, r"llama\.expert_count=8, which is not supported"),
        (LLAMA, {"rope.dimension_count": 8}, r"llama\.rope\.dimension_count=8, which is not supported"),
        (LLAMA, {"embedding_length": None}, r"lacks llama\.embedding_length"),
        (LLAMA, {"attention.head_count_kv": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        (LLAMA, {"attention.head_count_kv": [2, 1]}, r"llama\.attention\.head_count_kv=.*not a whole number"),
        (GEMMA, {"attention.sliding_window": None}, r"lacks gemma3\.attention\.sliding_window"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, architecture: str, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        checkpoint(write(tmp_path / "m.gguf", architecture, settings))


def test_parts_of_a_split_model_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m-00001-of-00002.gguf", extra=lambda writer: writer.add_uint16("split.count", 2))
    with pytest.raises(ConfigError, match=r"split\.count=2, which is not supported"):
        checkpoint(path)


def test_overrides_replace_what_config_json_would_say(llama: Path) -> None:
    assert GGUFCheckpoint(llama, {"rope_theta": 5e5}).config.rope.theta == 5e5
    assert GGUFCheckpoint(llama, {"max_position_embeddings": 64}).config.max_position_embeddings == 64
    with pytest.raises(ConfigError, match="--hf-overrides names 'rope_thta', which LlamaForCausalLM does not read"):
        GGUFCheckpoint(llama, {"rope_thta": 5e5})


def test_sizes_are_those_written(llama: Path) -> None:
    config = checkpoint(llama).config
    assert config.intermediate_size == SIZES["feed_forward_length"]
    assert (config.vocab_size, config.num_layers, config.num_kv_heads) == (50, 2, 2)
    assert config.checkpoint_dtype == "float32"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_unpacked_tensors_do_not_stay_in_memory_as_well() -> None:
    def mapped_bytes() -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
        return int(line.split()[1]) * 1024

    read = checkpoint(assets.smollm2())
    before = mapped_bytes()
    for name in sorted(read.names()):
        packed, weights = read.read_quantized(name), read.read(name)
        assert packed is None or packed.values.shape == weights.shape
    assert mapped_bytes() - before < 10_000_000, "the file has 98 MB"
