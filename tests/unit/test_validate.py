"""`fp8rl validate`: all faults of a file, by line; and what only the model's files tell."""

import json
from pathlib import Path

import pytest
from builders import make_job

from fp8rl_operator.validate import format_fault, load, validate_file, validate_local_files, with_lines

GOOD = """\
apiVersion: fp8rl.dev/v1alpha1
kind: FP8RLJob
metadata:
  name: job
spec:
  model: {source: {builtin: {name: reverse-text-tiny}}}
  trainer:
    backend: torch
    gpusPerReplica: 0
    optimizer:
      learningRate: "5e-4"
  inference: &pool
    replicas: 2
    gpusPerReplica: 0
  rollout:
    environment: {id: reverse-text}
    steps: 4
    batchSize: 8
    groupSize: 4
    maxTokens: 8
"""


@pytest.fixture
def lines_of(tmp_path):
    """The lines that `fp8rl validate` prints for a text."""

    def lines(text: str | bytes) -> list[str]:
        path = tmp_path / "job.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return [format_fault("job.yaml", fault) for fault in validate_file(path)]

    return lines


def test_a_good_file_has_no_fault(lines_of):
    assert lines_of(GOOD) == []
    assert lines_of(f"---\n# a comment\n{GOOD}...\n") == []


def test_all_faults_of_a_file_come_at_once_each_with_its_line(lines_of):
    text = (
        GOOD.replace("backend: torch", "backend: torch\n    offload: full")
        .replace('learningRate: "5e-4"', 'learningrate: "5e-4"\n      gradClip: "1.0"')
        .replace("replicas: 2", "replicas: 2\n    minReplicas: 3")
        .replace("batchSize: 8", "batchSize: 30")
        .replace("    steps: 4\n", "")
    )
    assert lines_of(text) == [
        "job.yaml:11: spec.trainer.optimizer.learningRate: is required; add learningRate, for example 1e-6: Peak learning rate",
        "job.yaml:12: spec.trainer.optimizer.learningrate: value 5e-4: unknown field; did you mean learningRate?",
        (
            "job.yaml:13: spec.trainer.optimizer.gradClip: value 1.0: offload full updates each parameter as soon as its gradient is on"
            " the host, before the norm of all gradients, which clipping divides by, is known; remove gradClip (unset means none), or"
            " set offload: optimizer"
        ),
        (
            "job.yaml:16: spec.inference.minReplicas: value 3: is over replicas 2: the job would wait for ever; set at most 2, or more"
            " replicas"
        ),
        "job.yaml:18: spec.rollout.steps: is required; add steps, for example 100: Optimizer steps of the whole job",
        "job.yaml:20: spec.rollout.batchSize: value 30: is no multiple of groupSize 4: 30 = 7 x 4 + 2; use 28 or 32",
    ]


def test_a_file_that_is_no_yaml_is_refused_with_the_line(lines_of):
    assert lines_of("a: [1,\nb: }\n") == [
        (
            "job.yaml:2: is no YAML: while parsing a flow node, expected the node content, but found '}'; correct this line or the one"
            " above"
        )
    ]
    assert lines_of("kind: x\n\tb: 1\n") == [
        (
            "job.yaml:2: is no YAML: while scanning for the next token, found character '\\t' that cannot start any token; correct this"
            " line or the one above"
        )
    ]


def test_a_yaml_tag_that_would_run_code_is_refused(lines_of):
    (line,) = lines_of("a: !!python/object/apply:os.system [ls]\n")
    assert line.startswith("job.yaml:1: is no YAML: could not determine a constructor for the tag")


@pytest.mark.parametrize("text", ["", "\n", "---\n", "# only a comment\n", "null\n"])
def test_an_empty_file_is_refused(lines_of, text: str):
    assert lines_of(text) == ["job.yaml: is empty; write apiVersion, kind: FP8RLJob, metadata and spec"]


def test_several_documents_are_refused_with_the_line_of_the_second(lines_of):
    assert lines_of(f"{GOOD}---\n{GOOD}") == ["job.yaml:22: holds 2 documents; keep one FP8RLJob in a file"]


def test_a_file_that_holds_no_mapping_is_refused(lines_of):
    assert lines_of("- a\n") == [
        "job.yaml:1: value ['a']: is no mapping of fields; start with apiVersion, kind, metadata and spec"
    ]


def test_binary_files_are_refused(lines_of):
    assert lines_of(b"a: \xff\n") == ["job.yaml: is no UTF-8 text: byte 3 is 0xff; save it as UTF-8"]
    (line,) = lines_of(b"\x00\x01")
    assert line.startswith("job.yaml: is no YAML: unacceptable character #x0000")


def test_a_file_of_another_kind_says_only_that(lines_of):
    assert lines_of("apiVersion: apps/v1\nkind: Deployment\nspec: {replicas: 1}\n") == [
        "job.yaml:1: apiVersion: value apps/v1: must be fp8rl.dev/v1alpha1; write fp8rl.dev/v1alpha1",
        "job.yaml:2: kind: value Deployment: must be FP8RLJob; write FP8RLJob",
    ]


def test_another_version_of_the_api_is_refused(lines_of):
    assert lines_of(GOOD.replace("v1alpha1", "v1")) == [
        "job.yaml:1: apiVersion: value fp8rl.dev/v1: must be fp8rl.dev/v1alpha1; write fp8rl.dev/v1alpha1"
    ]


def test_duplicate_keys_are_refused_with_both_lines(lines_of):
    assert lines_of(GOOD.replace("    steps: 4", "    steps: 4\n    steps: 5")) == [
        "job.yaml:18: spec.rollout.steps: is given twice, first on line 17; keep one of them"
    ]


def test_bare_decimals_are_warned_about_since_the_api_server_refuses_them(lines_of, tmp_path):
    text = GOOD.replace('"5e-4"', "5e-4\n      gradClip: 1.0\n      betas: [0.9, '0.95']")
    assert lines_of(text) == [
        (
            "job.yaml:11: warning: spec.trainer.optimizer.learningRate: value 5e-4: is a bare number, and the API server takes decimals"
            ' as strings; write "5e-4" where the job goes to a cluster'
        ),
        (
            "job.yaml:12: warning: spec.trainer.optimizer.gradClip: value 1.0: is a bare number, and the API server takes decimals as"
            ' strings; write "1.0" where the job goes to a cluster'
        ),
        (
            "job.yaml:13: warning: spec.trainer.optimizer.betas[0]: value 0.9: is a bare number, and the API server takes decimals as"
            ' strings; write "0.9" where the job goes to a cluster'
        ),
    ]
    job, _ = load(tmp_path / "job.yaml")
    assert job is not None
    assert job.spec.trainer.optimizer.learning_rate == 0.0005


def test_faults_of_merged_values_point_to_where_they_are_written(lines_of):
    text = GOOD.replace("replicas: 2", "replicas: 2\n    engineArgs: {quantization: fp8}") + (
        "  releases: {everySteps: 2, volume: {claimName: r}}\n  samplers:\n  - name: a\n    <<: *pool\n"
    )
    assert lines_of(text) == [
        (
            "job.yaml:14: spec.inference.engineArgs.quantization: value fp8: quantization is set by precision.wire; remove it from"
            " engineArgs"
        ),
        (
            "job.yaml:14: spec.samplers[0].engineArgs.quantization: value fp8: quantization is set by precision.wire; remove it"
            " from engineArgs"
        ),
    ]


def test_aliases_that_contain_themselves_or_multiply_are_refused(lines_of):
    assert lines_of("a: &a\n- *a\n") == ["job.yaml:1: contains itself by its alias; write the values out"]
    levels = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 7))
    (line,) = lines_of(f"l0: &l0 [1]\n{levels}")
    assert "expands to more than 100000 values by its aliases" in line


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (fault,) = validate_file(tmp_path / "no.yaml")
    assert format_fault("no.yaml", fault) == (
        "no.yaml: cannot be read: No such file or directory; name a job's manifest, such as deploy/samples/reverse-text.yaml"
    )
    (fault,) = validate_file(tmp_path)
    assert fault.reason == "cannot be read: Is a directory"


def test_a_huge_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "big.yaml"
    path.write_bytes(b"#" * ((1 << 20) + 1))
    (fault,) = validate_file(path)
    assert fault.reason == "has 1048577 bytes, over 1048576"


def test_dates_and_keys_that_are_no_strings_are_faults_and_no_crash(lines_of):
    assert lines_of(GOOD.replace("name: job", "name: 2026-11-30")) == [
        (
            "job.yaml:4: metadata.name: value 2026-11-30: names Services, which take lower-case letters, digits and dashes, and start"
            " with a letter; match ^[a-z]([-a-z0-9]*[a-z0-9])?$"
        )
    ]
    (line,) = lines_of(GOOD.replace("    steps: 4", "    steps: 4\n    7: 8"))
    assert line.startswith("job.yaml:18: spec.rollout.7: value 8: unknown field; known here: environment")


def test_settings_of_the_command_line_are_judged_with_the_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(GOOD)
    job, faults = load(path, lambda body: body["spec"].update(seed=7))
    assert job is not None
    assert (job.spec.seed, faults) == (7, [])
    job, faults = load(path, lambda body: body["spec"].update(seed=-7))
    assert job is None
    assert [fault.path for fault in faults] == ["spec.seed"]


def model_folder(tmp_path: Path, **config: object) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 4, "max_position_embeddings": 64, **config}))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 3}}, "added_tokens": []}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def local_faults(path: Path, **spec: object) -> list[str]:
    job = make_job({**spec, "model": {"source": None, "path": str(path), **spec.get("model", {})}})
    return [str(fault).replace(str(path.parent), "T") for fault in validate_local_files(job)]


def test_a_good_model_folder_has_no_fault(tmp_path):
    assert local_faults(model_folder(tmp_path)) == []


def test_a_missing_model_folder_is_refused(tmp_path):
    assert local_faults(tmp_path / "no") == [
        "spec.model.path: value T/no: does not exist, and a folder with the model's files is needed; correct the path"
    ]


def test_a_folder_without_tokenizer_weights_or_config_is_refused_for_each(tmp_path):
    (tmp_path / "empty").mkdir()
    assert local_faults(tmp_path / "empty") == [
        (
            "spec.model.path: value T/empty: has no tokenizer: none of tokenizer.json, tokenizer.model, vocab.json; copy the tokenizer's"
            " files there"
        ),
        "spec.model.path: value T/empty: has no weights: no *.safetensors; copy the model's safetensors files there",
        "spec.model.path: value T/empty/config.json: cannot be read: No such file or directory; copy the model's config.json there",
    ]


def test_files_that_are_no_json_are_refused(tmp_path):
    folder = model_folder(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    (line,) = local_faults(folder)
    assert line.startswith("spec.model.path: value T/model/tokenizer.json: is no JSON: ")
    (folder / "config.json").write_text("[]")
    (line,) = local_faults(folder)
    assert (
        line == "spec.model.path: value T/model/config.json: holds no JSON object; copy the model's config.json there"
    )


def test_a_tokenizer_that_does_not_fit_the_embedding_is_refused(tmp_path):
    assert local_faults(model_folder(tmp_path, vocab_size=3)) == [
        (
            "spec.model.path: value T/model/tokenizer.json: does not fit the model: its largest token id 3 has no row in an embedding of"
            " vocab_size 3; use the tokenizer that belongs to the model"
        )
    ]


def test_lengths_over_the_models_context_are_refused(tmp_path):
    folder = model_folder(tmp_path)
    assert local_faults(folder, model={"maxModelLen": 65}, rollout={"maxTokens": 64}) == [
        (
            "spec.model.maxModelLen: value 65: is over the model's own context, max_position_embeddings 64; set at most 64, or leave it"
            " unset (longest prompt + maxTokens)"
        ),
        "spec.rollout.maxTokens: value 64: leaves 0 tokens of the model's context 64 for a prompt; set maxTokens below 64",
    ]


def test_a_model_with_code_of_its_own_asks_for_trust(tmp_path):
    folder = model_folder(tmp_path, auto_map={"AutoModel": "x.Y"})
    assert local_faults(folder) == [
        (
            "spec.model.trustRemoteCode: value false: config.json of spec.model.path brings Python code of its own (auto_map); set"
            " trustRemoteCode: true if you trust it"
        )
    ]
    assert local_faults(folder, model={"trustRemoteCode": True}) == []


def test_a_missing_data_set_file_is_refused_and_claims_are_left_to_the_cluster(tmp_path):
    folder = model_folder(tmp_path)
    dataset = {"volume": {"hostPath": str(tmp_path), "path": "train.jsonl"}}
    assert local_faults(folder, rollout={"dataset": dataset}) == [
        "spec.rollout.dataset.volume.path: value T/train.jsonl: does not exist on this machine; correct the path"
    ]
    assert local_faults(folder, rollout={"dataset": {"volume": {"claimName": "data", "path": "train.jsonl"}}}) == []


def test_models_that_come_from_elsewhere_are_not_looked_for():
    assert validate_local_files(make_job()) == []


def test_faults_of_files_get_the_lines_of_their_fields(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(GOOD.replace("{source: {builtin: {name: reverse-text-tiny}}}", "\n    path: no/such/folder"))
    job, faults = load(path)
    assert job is not None
    assert faults == []
    assert [fault.line for fault in with_lines(path, validate_local_files(job))] == [7]


def weights(folder: Path, **shapes: list[int]) -> None:
    """A safetensors file with a header and no data."""
    header = {
        name.replace("__", "."): {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}
        for name, shape in shapes.items()
    }
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


BIG = {"embed__weight": [1 << 17, 1 << 12], "mlp__weight": [1 << 15, 1 << 14], "mlp__weight_scale_inv": [256, 128]}


def asking(folder: Path, memory: str, parameters: int | None = None):
    """A job that offloads everything: 2^30 parameters take 16 bytes each, 16 GiB."""
    asks = {"template": {"spec": {"containers": [{"name": "main", "resources": {"limits": {"memory": memory}}}]}}}
    trainer = {"backend": "megatron", "gpusPerReplica": 1, "offload": "full", **asks}
    return make_job({"model": {"source": None, "path": str(folder), "parameters": parameters}, "trainer": trainer})


def test_memory_that_does_not_hold_the_state_of_the_models_own_parameters_is_refused(tmp_path):
    folder = model_folder(tmp_path, tie_word_embeddings=True)
    weights(folder, **BIG, lm_head__weight=[1 << 17, 1 << 12])
    assert [str(fault) for fault in validate_local_files(asking(folder, "15Gi"))] == [
        (
            "spec.trainer.template.spec.containers[0].resources.limits.memory: value 15Gi: does not hold the state that offload full"
            " keeps in host memory: 16 bytes (masters 4, moments 8, gradients 4) x 1073741824 parameters / 1 replica = 16 GiB a pod;"
            " ask for 16Gi or more, leave it out (then it is computed), or set offload: none"
        )
    ]


def test_parameters_that_the_files_do_not_hold_are_refused(tmp_path):
    folder = model_folder(tmp_path)
    weights(folder, **BIG)
    assert [
        str(fault).replace(str(tmp_path), "T") for fault in validate_local_files(asking(folder, "16Gi", 900_000_000))
    ] == [
        (
            "spec.model.parameters: value 900000000: is not what the files in T/model hold, 1073741824 parameters: the trainer's memory"
            " request would be wrong; write 1073741824"
        )
    ]
    assert validate_local_files(asking(folder, "16Gi", 1_073_000_000)) == []
