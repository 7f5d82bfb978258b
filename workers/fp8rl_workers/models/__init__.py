"""The base model's folder: found, fetched or made before a role starts.

Reading order: `recipe` (the builtin model as data), `tokenizer`, `warmup` (the only file that imports torch), `folder`
(what a complete folder holds; locks, atomic renames), `hub`, `prepare` (the init container's command), `prompts` (the
orchestrator's, for prompts of a hub).
"""
