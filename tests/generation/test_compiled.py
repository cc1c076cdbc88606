"""Compiled verification: one graph a size of trees, padding that nobody sees, and a model left as it was.

Most of it runs the function that is handed to `torch.compile` as it is, since everything but the capture of graphs is
the same then.
"""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import nn
from transformers import CompileConfig, StaticCache

from caches import assert_same_cache
from generation.compiling import INDUCTOR, TRACED, breaks, compiled, graphs
from hf_ddtree.compat import CACHE_NAME, text_config
from hf_ddtree.generation import compiled as module
from hf_ddtree.generation.buckets import padded, rows_for
from hf_ddtree.tree import DraftTree
from linear_attention.hybrids import make_hybrid
from models import zoo
from pairs import in_threads, make_drafter, make_target, plain, prompt, tree

BUDGET, NEW = 13, 24
SAMPLED = {"do_sample": True, "temperature": 0.8}
FAMILIES = ["llama", "qwen3", "qwen3_sliding", "mistral", "gemma2", "gemma3", "gpt_oss", "qwen3_moe"]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """`torch.compile` gives the function back; what it was called with."""
    calls: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **settings: calls.append((function, settings)) or function)
    return calls


def parts(model: nn.Module) -> list[Any]:
    """What a model's modules hold, attribute by attribute, and their hooks."""
    held = [(name, key, id(value)) for name, m in model.named_modules() for key, value in vars(m).items()]
    return [*held, *(list(m._forward_hooks) for m in model.modules()), model.config._attn_implementation]


def check_one_graph(family: str, config: CompileConfig, **settings: Any) -> None:
    """Texts, caches and acceptance lengths are those of uncompiled calls, whose graphs are all made by the first."""
    target = make_target(family)
    drafter = make_drafter(target)
    first, broken = graphs(), breaks()
    for turn, (length, new) in enumerate([(11, NEW), (17, 18), (4, 31)]):
        ids = prompt(length, seed=turn)
        expected = plain(target, ids, max_new_tokens=new, return_dict_in_generate=True, cache_implementation="static")
        eager = tree(target, drafter, ids, budget=BUDGET, max_new_tokens=new, return_dict_in_generate=True)
        with torch._dynamo.config.patch(error_on_recompile=turn > 0):
            output = compiled(target, drafter, ids, config, budget=BUDGET, max_new_tokens=new, **settings)
        assert torch.equal(output.sequences, expected.sequences)
        assert output.speculation.acceptance_lengths == eager.speculation.acceptance_lengths
        assert_same_cache(output[CACHE_NAME], expected[CACHE_NAME])
        assert graphs() - first == 1
    sampled = plain(target, prompt(9), max_new_tokens=NEW, **SAMPLED)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(
            compiled(target, drafter, prompt(9), config, budget=BUDGET, max_new_tokens=NEW, **SAMPLED).sequences,
            sampled,
        )
    assert breaks() == broken


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_one_graph_serves_every_round_and_call(family: str) -> None:
    check_one_graph(family, TRACED)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("llama", "gemma3")])
def test_one_graph_in_every_family(family: str) -> None:
    check_one_graph(family, TRACED)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_sliding", "gemma2", "qwen3_moe"])
def test_inductor_s_code(family: str) -> None:
    check_one_graph(family, INDUCTOR)


def test_each_number_of_rows_has_a_graph() -> None:
    target = make_target("llama")
    drafter, first, seen = make_drafter(target), graphs(), []
    for budget in (3, 5, 7, 1, 6, 4, 2):
        compiled(target, drafter, prompt(), budget=budget, max_new_tokens=30)
        seen.append(graphs() - first)
    assert seen == [1, 2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("settings", [{}, SAMPLED, {"repetition_penalty": 1.3}], ids=["greedy", "sampled", "penalty"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_plain_decoding_s(family: str, settings: dict[str, Any], uncompiled: list[Any]) -> None:
    target = make_target(family)
    drafter, before = make_drafter(target), parts(target)
    kwargs = dict(max_new_tokens=NEW, **settings)
    eager = tree(target, drafter, prompt(), budget=BUDGET, return_dict_in_generate=True, **kwargs)
    output = compiled(target, drafter, prompt(), budget=BUDGET, **kwargs)
    assert torch.equal(output.sequences, plain(target, prompt(), **kwargs))
    assert output.speculation.acceptance_lengths == eager.speculation.acceptance_lengths
    assert output.speculation.nodes_verified == eager.speculation.nodes_verified
    (route, count), *others = output.speculation.attention_routes.items()
    layers = target.config.num_hidden_layers
    # Which one Gemma 2 is loaded with depends on the release.
    implementation = "eager" if target.config._attn_implementation == "eager" else "packed"
    assert route == f"{implementation}, compiled" and not others
    assert count == layers * output.speculation.rounds
    # The library notes the length of its last static cache on the model.
    assert [part for part in parts(target) if part[1:2] != ("_previous_max_cache_length",)] == before


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_left_padding(family: str, uncompiled: list[Any]) -> None:
    target = make_target(family)
    ids, mask = prompt(11).clone(), torch.ones(1, 11, dtype=torch.long)
    ids[:, :4] = mask[:, :4] = 0
    output = compiled(target, make_drafter(target), ids, budget=BUDGET, max_new_tokens=NEW, attention_mask=mask)
    assert torch.equal(output.sequences, plain(target, ids, max_new_tokens=NEW, attention_mask=mask))


@pytest.mark.slow
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_every_family_takes_it_or_says_why_not(
    family: str, uncompiled: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    module.logger.warning_once.cache_clear()
    caplog.set_level("WARNING", "hf_ddtree")
    target = make_target(zoo.FAMILIES[family].build)
    try:
        plain(target, prompt(), max_new_tokens=NEW, cache_implementation="static")
    except (ValueError, RuntimeError, TypeError, IndexError) as error:
        pytest.skip(f"the library has no static cache for it: {error}")
    drafter = make_drafter(target, num_target_layers=text_config(target).num_hidden_layers)
    try:
        output = compiled(target, drafter, prompt(), budget=BUDGET, max_new_tokens=NEW)
    except ValueError as refusal:
        pytest.skip(str(refusal))
    assert torch.equal(output.sequences, plain(target, prompt(), max_new_tokens=NEW))
    assert bool(uncompiled) != ("verified uncompiled" in caplog.text)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_sliding"])
def test_nothing_of_the_padding_comes_out(family: str, uncompiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are unreadable numbers in every output, and the scores, states and weights are plain decoding's."""
    target, real, own = make_target(family, implementation="eager"), module.CompiledForward.__call__, []
    drafter = make_drafter(target)

    def poisoned(forward: Any, inputs: Any) -> Any:
        outputs = real(forward, inputs)
        nodes = own.pop()
        states = [state for states in forward.taps._states.values() for state in states]
        for tensor in (outputs.logits, *states, *outputs.hidden_states):
            assert tensor.shape[1] == 16
            tensor[:, nodes:] = torch.nan
        for tensor in outputs.attentions:
            tensor[:, :, nodes:] = torch.nan
        return outputs

    monkeypatch.setattr(module.CompiledForward, "__call__", poisoned)
    monkeypatch.setattr(
        "hf_ddtree.generation.verification.padded", lambda tree, rows: own.append(len(tree)) or padded(tree, rows)
    )
    wanted = dict(output_scores=True, output_logits=True, output_hidden_states=True, output_attentions=True)
    output = compiled(target, drafter, prompt(), budget=BUDGET, max_new_tokens=NEW, **wanted)
    expected = plain(
        target, prompt(), max_new_tokens=NEW, return_dict_in_generate=True, cache_implementation="static", **wanted
    )
    assert torch.equal(output.sequences, expected.sequences) and output.speculation.mean_acceptance_length > 1
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(output, name), getattr(expected, name), rtol=1e-4, atol=1e-4)
    for name in ("hidden_states", "attentions"):
        for found, layers in zip(getattr(output, name)[1:], getattr(expected, name)[1:], strict=True):
            for tensor, other in zip(found, layers, strict=True):
                torch.testing.assert_close(tensor, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "qwen3_moe"])
def test_no_node_sees_the_padding(family: str, uncompiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tokens at other positions there change no number."""
    target, found = make_target(family), []
    drafter, real = make_drafter(target), module.CompiledForward.__call__

    def noted(forward: Any, inputs: Any) -> Any:
        outputs = real(forward, inputs)
        found.append(outputs.logits[:, : BUDGET + 1].clone())
        return outputs

    def otherwise(tree: DraftTree, rows: int) -> DraftTree:
        whole = padded(tree, rows)
        whole.token_ids[len(tree) :] = 9
        whole.depths[len(tree) :] = 2
        return whole

    monkeypatch.setattr(module.CompiledForward, "__call__", noted)
    compiled(target, drafter, prompt(), budget=BUDGET, max_new_tokens=8)
    expected, found[:] = list(found), []
    monkeypatch.setattr("hf_ddtree.generation.verification.padded", otherwise)
    compiled(target, drafter, prompt(), budget=BUDGET, max_new_tokens=8)
    # The last tree may be the root alone.
    for tensor, other in zip(found[:-1], expected[:-1], strict=True):
        # A mixture's rows are sorted by expert, so that sums may be taken otherwise.
        torch.testing.assert_close(tensor, other, rtol=0, atol=1e-4 if family in ("qwen3_moe", "gpt_oss") else 1e-6)


@pytest.mark.parametrize(("nodes", "rows"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (64, 64), (65, 128), (512, 512)])
def test_rows_are_powers_of_two(nodes: int, rows: int) -> None:
    assert rows_for(nodes) == rows


def test_a_padded_tree_s_own_part_is_the_tree() -> None:
    whole = padded(DraftTree.root_only(7), 4)
    assert whole.token_ids.tolist() == [7] * 4 and whole.depths.tolist() == [0] * 4
    assert torch.equal(whole.visibility(), torch.eye(4, dtype=torch.bool))


def test_a_conversation_goes_on_compiled_or_not(uncompiled: list[Any]) -> None:
    target = make_target("qwen3_sliding")
    drafter, ids = make_drafter(target), prompt()
    cache = StaticCache(config=target.config, max_cache_len=90)
    for turn in range(4):
        config = {"compile_config": TRACED} if turn % 2 == 0 else {}
        out = tree(target, drafter, ids, budget=BUDGET, max_new_tokens=9, **{CACHE_NAME: cache}, **config)
        assert torch.equal(out, plain(target, ids, max_new_tokens=9))
        ids = torch.cat([out, prompt(3, seed=turn)], dim=1)
    assert len(uncompiled) == 3


@pytest.mark.usefixtures("scripted")
def test_rounds_of_all_sizes_teach_the_drafter_the_same(uncompiled: list[Any]) -> None:
    """Sizes jump, to nothing drafted and back: the drafter reads the tree's own rows only, whatever fills a graph."""
    target = make_target("qwen3")
    drafter = make_drafter(target)
    settings = dict(budget="auto", max_new_tokens=40, cache_implementation="static", return_dict_in_generate=True)
    eager = tree(target, drafter, prompt(), **settings)
    assert not uncompiled
    graph = tree(target, drafter, prompt(), compile_config=TRACED, **settings)
    assert uncompiled
    assert torch.equal(graph.sequences, eager.sequences)
    assert graph.speculation.acceptance_lengths == eager.speculation.acceptance_lengths
    assert max(eager.speculation.acceptance_lengths) > 1 and 0 in eager.speculation.tree_sizes
    whole, padded = (output[CACHE_NAME].drafter_context for output in (eager, graph))
    assert padded.length == whole.length == eager.sequences.shape[1] - 1


def test_a_last_round_without_a_draft_leaves_no_padding_to_read(uncompiled: list[Any]) -> None:
    """With room for one more token nothing is drafted, and the root's graph is filled up as a tree's."""
    target = make_target("qwen3")
    drafter = make_drafter(target)
    undrafted = 0
    for new in range(2, 8):
        settings = dict(budget=BUDGET, max_new_tokens=new, return_dict_in_generate=True, compile_config=TRACED)
        output = tree(target, drafter, prompt(), cache_implementation="static", **settings)
        undrafted += output.speculation.tree_sizes[-1] == 0
        assert output[CACHE_NAME].drafter_context.length == output.sequences.shape[1] - 1
    assert undrafted and uncompiled


def test_threads_do_not_see_each_other(uncompiled: list[Any]) -> None:
    target = make_target("gemma3")
    drafter, outputs = make_drafter(target), [None] * 4
    expected = [plain(target, prompt(seed=seed), max_new_tokens=30) for seed in range(4)]

    def run(seed: int) -> None:
        ways: list[Any] = [plain, tree, compiled, compiled]
        arguments = (target,) if seed == 0 else (target, drafter)
        out = ways[seed](*arguments, prompt(seed=seed), max_new_tokens=30)
        outputs[seed] = getattr(out, "sequences", out)

    in_threads(run, 4)
    assert all(map(torch.equal, outputs, expected))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_forward_leaves_cache_and_model(
    error: type[BaseException], uncompiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target("gemma3")
    drafter, before, calls = make_drafter(target), parts(target), []
    real = target.model.layers[2].mlp.forward

    def failing(*args: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            raise error
        return real(*args)

    cache = StaticCache(config=target.config, max_cache_len=60)
    tree(target, drafter, prompt(), max_new_tokens=2)
    monkeypatch.setattr(target.model.layers[2].mlp, "forward", failing)
    with pytest.raises(error):
        tree(target, drafter, prompt(), max_new_tokens=30, compile_config=TRACED, **{CACHE_NAME: cache})
    monkeypatch.delattr(target.model.layers[2].mlp, "forward")
    assert parts(target) == before
    # The prompt's forward and the first round went well.
    expected = plain(target, prompt(), max_new_tokens=30)
    length = int(cache.get_seq_length())
    assert length > 11 and all(int(layer.get_seq_length()) == length for layer in cache.layers)
    text = tree(target, drafter, expected[:, : length + 1], max_new_tokens=5, **{CACHE_NAME: cache})
    assert torch.equal(text, expected[:, : length + 6])


def test_changes_of_the_model_are_followed(uncompiled: list[Any]) -> None:
    target = make_target("llama")
    drafter, ids = make_drafter(target), prompt()
    compiled(target, drafter, ids, max_new_tokens=4)
    for change in (
        lambda: setattr(target, "lm_head", make_target("llama", seed=4).lm_head),
        lambda: setattr(target.model, "norm", make_target("llama", seed=5).model.norm),
        lambda: setattr(target.model.layers[2], "mlp", make_target("llama", seed=6).model.layers[2].mlp),
        lambda: target.model.layers[0].self_attn.q_proj.weight.data.mul_(1.5),
    ):
        change()
        with torch.no_grad():
            expected = plain(target, ids, max_new_tokens=NEW)
        assert torch.equal(compiled(target, drafter, ids, max_new_tokens=NEW).sequences, expected)
    assert len(module._graphs[target]) == 1


def test_another_drafter_has_graphs_of_its_own(uncompiled: list[Any]) -> None:
    target, ids = make_target("llama"), prompt()
    for layer_ids in ([0, 2, 3], [3, 1, 0], [1, 2, 2]):
        drafter = make_drafter(target, target_layer_ids=layer_ids)
        eager = tree(target, drafter, ids, max_new_tokens=NEW, return_dict_in_generate=True)
        output = compiled(target, drafter, ids, max_new_tokens=NEW)
        assert output.speculation.acceptance_lengths == eager.speculation.acceptance_lengths
    assert len(module._graphs[target]) == 3


def test_a_model_and_its_graphs_are_let_go(uncompiled: list[Any]) -> None:
    target = make_target("llama")
    target._compiled_call = target.__call__
    compiled(target, make_drafter(target), prompt(), max_new_tokens=4)
    known = weakref.ref(target)
    del target
    gc.collect()
    assert known() is None


class TestWhatIsAsked:
    """A static cache and a config, and not `disable_compile`."""

    @pytest.mark.parametrize(
        ("settings", "wanted"),
        [
            ({"cache_implementation": "static", "compile_config": TRACED}, True),
            ({"cache_implementation": "static", "compile_config": TRACED, "disable_compile": True}, False),
            ({"cache_implementation": "static"}, False),
            ({"compile_config": TRACED}, False),
            ({}, False),
        ],
    )
    def test_compiled_or_not(self, settings: dict[str, Any], wanted: bool, uncompiled: list[Any]) -> None:
        target = make_target("llama")
        tree(target, make_drafter(target), prompt(), max_new_tokens=6, **settings)
        assert bool(uncompiled) == wanted

    def test_the_settings_reach_the_compiler(self, uncompiled: list[Any]) -> None:
        target, config = make_target("llama"), CompileConfig(mode="default", dynamic=False)
        tree(
            target, make_drafter(target), prompt(), max_new_tokens=6, cache_implementation="static",
            compile_config=config,
        )  # fmt: skip
        expected = dict(fullgraph=False, dynamic=False, backend="inductor", mode="default", options=None)
        assert all(settings == expected for _, settings in uncompiled)

    def test_settings_that_pytorch_refuses_are_refused_before_a_token(self) -> None:
        target = make_target("llama")
        config = CompileConfig(backend="inductor", options={"max_autotune": True})
        with pytest.raises(RuntimeError, match="mode or options"):
            compiled(target, make_drafter(target), prompt(), config, max_new_tokens=6)

    @pytest.mark.parametrize("options", [None, {"freezing": True}])
    def test_freezing_is_refused(self, options: Any) -> None:
        target, config = make_target("llama"), CompileConfig(mode=None, options=options)
        with (
            torch._inductor.config.patch(freezing=options is None),
            pytest.raises(ValueError, match=r"freezing.*packed_weights"),
        ):
            compiled(target, make_drafter(target), prompt(), config, max_new_tokens=6)

    def test_no_compiler_is_said_before_a_token(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._inductor import cpp_builder, exc

        def missing() -> None:
            raise exc.InvalidCxxCompiler

        monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
        target = make_target("llama")
        with pytest.raises(ValueError, match=r"needs a C\+\+ compiler.*install g\+\+"):
            compiled(target, make_drafter(target), prompt(), INDUCTOR, max_new_tokens=6)

    def test_recurrent_layers_run_uncompiled_and_a_warning_says_so(
        self, uncompiled: list[Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        module.logger.warning_once.cache_clear()
        target, ids = make_hybrid(), prompt()
        caplog.set_level("WARNING", "hf_ddtree")
        output = compiled(target, make_drafter(target), ids, max_new_tokens=12)
        assert torch.equal(output.sequences, plain(target, ids, max_new_tokens=12)) and not uncompiled
        assert "recurrent layers" in caplog.text and "uncompiled" in caplog.text

    def test_layers_that_hooks_run_are_not_compiled(
        self, uncompiled: list[Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        module.logger.warning_once.cache_clear()
        target = make_target("llama")
        target.model.layers[1].forward = target.model.layers[1].forward
        caplog.set_level("WARNING", "hf_ddtree")
        compiled(target, make_drafter(target), prompt(), max_new_tokens=6)
        assert "hooks run its layers" in caplog.text and not uncompiled
