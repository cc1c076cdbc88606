"""Ways of loading a target under which one process or one forward does not hold what a tree needs."""

from transformers import PreTrainedModel

from hf_ddtree.compat import unserved_parallelism


def check(target: PreTrainedModel) -> None:
    """Raises `ValueError` for a target that is split by layers or by tokens, or that reads learned prompts."""
    name = type(target).__name__
    setting = unserved_parallelism(target)
    if setting is not None:
        raise ValueError(
            f"{name} was loaded with `DistributedConfig({setting}=...)`, under which a process does not see the "
            "states of every layer and token, which the drafter reads. Load it with `tp_plan` or `fsdp_size` alone."
        )
    # While a PEFT model of this kind generates, it prepares the inputs of the model inside it.
    adapter = getattr(vars(target).get("prepare_inputs_for_generation"), "__self__", None)
    if getattr(getattr(adapter, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"{type(adapter).__name__} prepends learned prompts to its inputs, which draft trees do not know of. "
            "Generate without `assistant_model`."
        )
