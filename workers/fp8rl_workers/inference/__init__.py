"""Inference worker: vLLM's own OpenAI server with a plugin that receives weights in place, in two phases.

`python -m fp8rl_workers.inference` waits for the resolved precision, then becomes vLLM's server. `plugin` loads in each of
vLLM's processes; `routes` and `auth` live in the API server, `core` in the engine core, `engine` and `agent` in each
worker rank. `weights.load` holds what is done to the parameters.
"""
