"""Every way a tree's configuration travels to `generate`: the tree runs as configured, or an error says why not."""

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin

from hf_ddtree import DDTreeConfig, record
from hf_ddtree.configuration import DEFAULT_BUDGET, LARGEST_AUTO, MAX_BUDGET, SPECULATION_TYPE, TreeSettings
from pairs import make_drafter, make_target, prompt

FIELDS: dict[str, Any] = dict(budget=9, max_branching=2, output_trees=True, attention_route="torch")
NEW = 17


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    target = make_target("llama")
    return target, make_drafter(target)


@pytest.fixture
def target(pair: tuple[Any, Any]) -> Any:
    """The module's target; its own generation config is put back."""
    model = pair[0]
    before = model.generation_config
    yield model
    model.generation_config = before


@pytest.fixture
def drafter(pair: tuple[Any, Any]) -> Any:
    return pair[1]


@pytest.fixture(autouse=True)
def native_chain(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of the library's own assisted decoding, which nothing here may reach unless it asks for it."""
    calls: list[str] = []
    original = GenerationMixin._assisted_decoding

    def spy(*args: Any, **kwargs: Any) -> Any:
        calls.append("native")
        return original(*args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", spy)
    return calls


def config(**overrides: Any) -> DDTreeConfig:
    return DDTreeConfig(**{**FIELDS, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **overrides})


def assert_tree(run: Callable[[], Any], calls: list[str], budget: int = 9, branching: int | None = 2) -> None:
    """`run` generates with trees of exactly `budget` nodes and nodes of at most `branching` children."""
    with record() as stats:
        output = run()
    assert output.shape[1] == prompt().shape[1] + NEW
    assert calls == []
    assert stats.rounds
    assert stats.trees is not None
    assert max(verified.tree.num_drafted for verified in stats.trees) == budget
    widest = max(max(map(len, verified.tree.children)) for verified in stats.trees)
    assert widest == branching if branching else widest > 2


def through_json(cls: type[GenerationConfig]) -> Callable[[DDTreeConfig, Path], GenerationConfig]:
    def travel(original: DDTreeConfig, folder: Path) -> GenerationConfig:
        original.save_pretrained(folder)
        return cls.from_pretrained(folder)

    return travel


TRAVELS: dict[str, Callable[[DDTreeConfig, Path], GenerationConfig]] = {
    "as_it_is": lambda c, _: c,
    "deepcopy": lambda c, _: copy.deepcopy(c),
    "pickle": lambda c, _: pickle.loads(pickle.dumps(c)),
    "json_as_ours": through_json(DDTreeConfig),
    "json_as_plain": through_json(GenerationConfig),
    "dict_as_ours": lambda c, _: DDTreeConfig.from_dict(c.to_dict()),
    "dict_as_plain": lambda c, _: GenerationConfig.from_dict(c.to_dict()),
    "fields_of_a_plain_one": lambda c, _: GenerationConfig(**c.to_diff_dict()),
    "json_twice": lambda c, f: through_json(DDTreeConfig)(through_json(GenerationConfig)(c, f / "a"), f / "b"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("travel", list(TRAVELS))
def test_passed_to_generate(travel: str, target: Any, drafter: Any, native_chain: list[str], tmp_path: Path) -> None:
    given = TRAVELS[travel](config(), tmp_path)
    assert {name: getattr(given, name) for name in FIELDS} == FIELDS
    assert given.speculation_type == SPECULATION_TYPE
    before = given.to_dict()
    assert_tree(lambda: target.generate(prompt(), assistant_model=drafter, generation_config=given), native_chain)
    assert given.to_dict() == before


@pytest.mark.parametrize("travel", list(TRAVELS))
def test_set_on_the_model(travel: str, target: Any, drafter: Any, native_chain: list[str], tmp_path: Path) -> None:
    """Here the library builds a plain config and copies the fields over."""
    target.generation_config = TRAVELS[travel](config(), tmp_path)
    assert_tree(lambda: target.generate(prompt(), assistant_model=drafter), native_chain)
    assert_tree(lambda: target.generate(prompt(), assistant_model=drafter, max_new_tokens=NEW), native_chain)


def test_set_on_the_model_beside_a_plain_one(target: Any, drafter: Any, native_chain: list[str]) -> None:
    target.generation_config = config()
    plain = GenerationConfig(max_new_tokens=NEW, do_sample=False)
    assert_tree(lambda: target.generate(prompt(), assistant_model=drafter, generation_config=plain), native_chain)


def test_set_on_the_model_beside_one_of_ours(target: Any, drafter: Any, native_chain: list[str]) -> None:
    """What the call's config leaves open comes from the model's."""
    target.generation_config = config(budget=11)
    given = DDTreeConfig(max_branching=2, output_trees=True, max_new_tokens=NEW, do_sample=False)
    run = lambda: target.generate(prompt(), assistant_model=drafter, generation_config=given)  # noqa: E731
    assert_tree(run, native_chain, budget=11)
    given.budget = 3
    assert_tree(run, native_chain, budget=3)


@pytest.mark.parametrize("cls", [DDTreeConfig, GenerationConfig])
def test_arguments_beside_a_config(
    cls: Any, target: Any, drafter: Any, native_chain: list[str], tmp_path: Path
) -> None:
    """`budget=` beside the config rules, also beside one that was reloaded as a plain one."""
    config(max_new_tokens=5).save_pretrained(tmp_path)
    given = cls.from_pretrained(tmp_path)
    run = lambda **kwargs: target.generate(  # noqa: E731
        prompt(), assistant_model=drafter, generation_config=given, max_new_tokens=NEW, **kwargs
    )
    assert_tree(lambda: run(budget=5), native_chain, budget=5)
    assert_tree(lambda: run(budget=12, max_branching=3), native_chain, budget=12, branching=3)
    with pytest.raises(ValueError, match=r"budget.*-1"):
        run(budget=-1)
    assert given.budget == 9


def test_saved_and_reloaded_with_the_model(target: Any, drafter: Any, native_chain: list[str], tmp_path: Path) -> None:
    target.generation_config = config()
    target.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["budget"] == 9
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_tree(lambda: reloaded.generate(prompt(), assistant_model=drafter), native_chain)


def test_a_drafter_alone_means_a_tree(target: Any, drafter: Any, native_chain: list[str]) -> None:
    plain = GenerationConfig(max_new_tokens=NEW, do_sample=False, output_trees=True)
    run = lambda: target.generate(prompt(), assistant_model=drafter, generation_config=plain)  # noqa: E731
    assert_tree(run, native_chain, budget=DEFAULT_BUDGET["cpu"], branching=None)


def test_the_native_chain_runs_when_it_is_asked_for(target: Any, drafter: Any, native_chain: list[str]) -> None:
    ids, plain = prompt(), GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    mask = torch.ones_like(ids)
    chain = copy.deepcopy(plain)
    chain.speculation_type = "dflash"
    with record() as stats:
        output = target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=chain)
    assert native_chain == ["native"]
    assert stats.rounds == 0
    assert torch.equal(output, target.generate(ids, generation_config=plain))


def test_other_assistants_keep_their_strategy(target: Any, native_chain: list[str]) -> None:
    assistant = make_target("llama", seed=1)
    target.generate(prompt(), assistant_model=assistant, max_new_tokens=NEW, do_sample=False)
    assert native_chain == ["native"]


def test_a_tree_without_a_drafter_is_an_error(target: Any, native_chain: list[str], tmp_path: Path) -> None:
    config().save_pretrained(tmp_path)
    for given in (config(), GenerationConfig.from_pretrained(tmp_path)):
        with pytest.raises(ValueError, match=r"no drafter.*DFlashModel"):
            target.generate(prompt(), generation_config=given)
    target.generation_config = config()
    with pytest.raises(ValueError, match=r"no drafter.*DFlashModel"):
        target.generate(prompt())
    assert native_chain == []


def test_a_tree_with_another_assistant_is_an_error(target: Any, native_chain: list[str]) -> None:
    with pytest.raises(ValueError, match=r"DFlash drafter.*LlamaForCausalLM"):
        target.generate(prompt(), assistant_model=make_target("llama", seed=1), generation_config=config())
    assert native_chain == []


def test_a_tree_config_turned_into_a_chain_is_an_error(target: Any, drafter: Any, native_chain: list[str]) -> None:
    with pytest.raises(ValueError, match=r"speculation_type='ddtree'.*'dflash'"):
        target.generate(prompt(), assistant_model=drafter, generation_config=config(), speculation_type="dflash")
    assert native_chain == []


def test_a_tree_s_fields_without_a_config_are_an_error(target: Any, drafter: Any) -> None:
    with pytest.raises(ValueError, match="budget"):
        target.generate(prompt(), assistant_model=drafter, max_new_tokens=NEW, budget=9)


INVALID = [
    ("budget", -1),
    ("budget", MAX_BUDGET + 1),
    ("budget", 1.5),
    ("budget", True),
    ("budget", "9"),
    ("budget", "Auto"),
    ("max_branching", 0),
    ("max_branching", -2),
    ("max_branching", False),
    ("output_trees", 1),
    ("output_trees", None),
    ("attention_route", "flash"),
    ("attention_route", True),
]


@pytest.mark.parametrize("name, value", INVALID)
def test_values_out_of_range_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"`{name}`.*{value!r}"):
        DDTreeConfig(**{name: value})
    later = DDTreeConfig()
    setattr(later, name, value)
    with pytest.raises(ValueError, match=rf"`{name}`"):
        later.validate()


@pytest.mark.parametrize("name, value", INVALID)
def test_values_out_of_range_in_a_file_stop_before_the_first_forward(
    name: str, value: Any, target: Any, drafter: Any, tmp_path: Path
) -> None:
    """A file edited by hand, read by the plain class, which knows nothing of our fields."""
    config().save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    given = GenerationConfig.from_pretrained(tmp_path)
    forwards: list[Any] = []
    handle = target.register_forward_pre_hook(lambda *_: forwards.append(1))
    with pytest.raises(ValueError, match=rf"`{name}`"):
        target.generate(prompt(), assistant_model=drafter, generation_config=given)
    handle.remove()
    assert not forwards


@pytest.mark.parametrize("budget", [0, 1, MAX_BUDGET, None, "auto"])
def test_values_in_range(budget: int | str | None) -> None:
    assert TreeSettings.read(DDTreeConfig(budget=budget)).budget == budget


def test_an_automatic_budget_travels(tmp_path: Path) -> None:
    for name, travel in TRAVELS.items():
        given = travel(config(budget="auto"), tmp_path / name)
        settings = TreeSettings.read(given)
        assert settings.budget == settings.budget_on("cpu") == settings.budget_on("cuda") == "auto"
    assert [TreeSettings.read(DDTreeConfig(budget="auto")).largest_on(device) for device in ("cpu", "cuda")] == [
        LARGEST_AUTO["cpu"],
        LARGEST_AUTO["accelerator"],
    ]
    assert [TreeSettings.read(DDTreeConfig(budget=9)).largest_on(device) for device in ("cpu", "cuda")] == [9, 9]


def test_a_wrong_word_names_the_right_one() -> None:
    with pytest.raises(ValueError, match=r"`budget` must be 'auto', a whole number from 0 .* or None, got 'best'"):
        DDTreeConfig(budget="best")


def test_another_speculation_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"speculation_type='ddtree'.*'dflash'.*GenerationConfig"):
        DDTreeConfig(speculation_type="dflash")


def test_default_budgets() -> None:
    assert [TreeSettings.read(DDTreeConfig()).budget_on(device) for device in ("cpu", "cuda", "mps")] == [15, 511, 511]
    assert TreeSettings.read(DDTreeConfig(budget=0)).budget_on("cuda") == 0


def test_the_other_fields_keep_their_meaning() -> None:
    given = DDTreeConfig(temperature=0.3, do_sample=True, top_k=5, eos_token_id=[3, 4])
    assert (given.temperature, given.do_sample, given.top_k, given.eos_token_id) == (0.3, True, 5, [3, 4])
    with pytest.raises(ValueError, match="max_new_tokens"):
        DDTreeConfig(max_new_tokens=-1)
