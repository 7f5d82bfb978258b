"""`spec.model`: where the base model comes from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fp8rl_operator.spec.base import Model, ObjectName, Text

BUILTIN_MODELS = ("reverse-text-tiny",)


class ClaimSource(Model):
    """A PersistentVolumeClaim of the job's namespace that holds the model's files."""

    claim_name: ObjectName = Field(
        description="Name of the PersistentVolumeClaim. Mounted read-only in every pod that needs the model.",
        examples=["models"],
    )


class HostPathSource(Model):
    """A folder of every node (or of this machine) that holds the model's files."""

    path: Text = Field(
        description="Folder on the node. In a cluster only in namespaces that the operator's settings allow.",
        examples=["/models"],
    )


class HubSource(Model):
    """A repository of a Hugging Face hub."""

    repository: Text = Field(description="Repository, `owner/name`.", examples=["Qwen/Qwen3-0.6B"])
    secret_name: ObjectName | None = Field(
        None, description="Secret of the job's namespace whose key `token` holds the access token. Unset: no token."
    )
    cache_claim_name: ObjectName | None = Field(
        None,
        description="PersistentVolumeClaim that keeps the files, so that they are fetched once; ReadWriteMany where pods run on"
        " several nodes. Unset: every pod fetches them into a folder of its own.",
    )


class BuiltinSource(Model):
    """A small model that fp8rl makes by itself, without any download."""

    name: Literal["reverse-text-tiny"] = Field(description="Name of the builtin model.", examples=["reverse-text-tiny"])


class ModelSource(Model):
    """Exactly one of the fields."""

    pvc: ClaimSource | None = Field(None, description="Files on a PersistentVolumeClaim.")
    host_path: HostPathSource | None = Field(None, description="Files in a folder of the node, or of this machine.")
    hub: HubSource | None = Field(None, description="Files of a Hugging Face hub, fetched by an init container.")
    builtin: BuiltinSource | None = Field(None, description="A small model that fp8rl makes by itself.")


class ModelSpec(Model):
    """The base model: Hugging Face files (config.json, tokenizer, safetensors), BF16 or an FP8 release."""

    path: Text | None = Field(
        None,
        description="Folder of the model's files. With source pvc or hostPath: relative to it, default its root. Without"
        " source: a folder that the process sees (on one machine any local folder, in a cluster one of the image or of a"
        " volume of the templates). Not with hub and builtin.",
    )
    source: ModelSource | None = Field(
        None, description="Where the files come from. Unset: path is a folder that every process sees already."
    )
    revision: Text | None = Field(
        None,
        description="Branch, tag or commit of the hub's repository. Unset: its default branch. Only with source.hub.",
    )
    parameters: Annotated[int, Field(ge=1, le=100_000_000_000_000)] | None = Field(
        None,
        description="Number of the model's parameters, from which the trainer's memory request is computed (trainer.offload)."
        " Unset: counted by `fp8rl validate` where the files lie on its machine, else not known.",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python code that comes with the model. In a cluster only in namespaces that the operator's"
        " settings allow.",
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        le=10_000_000,
        description="Longest sequence of an engine, prompt and completion. Unit: tokens. Unset: the longest prompt plus"
        " rollout.maxTokens, never the checkpoint's own context.",
    )
    chat_template: str | None = Field(
        None,
        max_length=65536,
        description="Jinja chat template, used by all roles. Unset: the tokenizer's own.",
    )
