"""Extras of one framework in another's terms: arguments, configuration, step, parameter groups, scheduler, loss scale.

`framework_extras` decides whether a checkpoint needs translating. `model_config` is the framework-neutral description
of a model, through which `config.json` (`hf_config`) and Megatron's arguments (`megatron_args`) are translated.
"""
