"""Environment variables of launchers."""

import pytest

from firstloss.errors import BackendError
from firstloss.runtime.mesh.launchers import LaunchedProcess, first_node, launch_of

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "4099", "SLURM_STEP_NODELIST": "gpu[03-06,9]"}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "train-0.train",
    "MASTER_PORT": "1234",
}
CASES = {
    "none": ({"HOME": "/"}, None),
    "torchrun": ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, LaunchedProcess("torchrun", "node7:29501", 8, 3)),
    "a launcher with torchrun's names": (TORCHRUN, LaunchedProcess("torchrun", "node7:29500", 8, 3)),
    "torchrun within SLURM": ({**SLURM, **TORCHRUN}, LaunchedProcess("torchrun", "node7:29500", 8, 3)),
    "SLURM": (SLURM, LaunchedProcess("SLURM", "gpu03:61443", 16, 5)),
    "Kubernetes": (KUBERNETES, LaunchedProcess("the Kubernetes Job", "train-0.train:1234", 2, 0)),
    "an indexed Job of one": ({"JOB_COMPLETION_INDEX": "0"}, None),
    "one process": ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, None),
}


@pytest.mark.parametrize("name", CASES)
def test_environment_variables_are_read(name):
    environ, expected = CASES[name]
    assert launch_of(environ) == expected


@pytest.mark.parametrize("environ", [TORCHRUN, SLURM, KUBERNETES], ids=["torchrun", "SLURM", "Kubernetes"])
def test_missing_and_invalid_variables_are_named(environ):
    chosen = {"RANK", "SLURM_PROCID", "SLURM_NTASKS", "JOB_COMPLETION_INDEX"}
    kubernetes = {"WORLD_SIZE"} if environ is KUBERNETES else set()
    for name in environ.keys() - chosen - kubernetes:
        with pytest.raises(BackendError, match="NODELIST" if "NODELIST" in name else name):
            launch_of({key: value for key, value in environ.items() if key != name})
    for name, value in environ.items():
        if value.isdecimal():
            with pytest.raises(BackendError, match=f"{name}='a few', which is not a number"):
                launch_of({**environ, name: "a few"})


def test_an_index_beyond_the_count_is_an_error():
    with pytest.raises(BackendError, match="this is process 8 of 8"):
        launch_of({**TORCHRUN, "RANK": "8"})


@pytest.mark.parametrize(
    "nodes, first",
    [("a", "a"), ("a,b", "a"), ("n[1-3]", "n1"), ("n[01,07],m", "n01"), ("rack1-n[3-4]-ib,x", "rack1-n3-ib")],
)
def test_the_first_node_is_parsed(nodes, first):
    assert first_node(nodes) == first
