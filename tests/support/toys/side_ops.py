"""Ops beside those of toy_ops, for tests of how nodes run: they meet, fail for a while, wait, and look around."""

from pathlib import Path

from toy_ops import Toy

MORE_OPS = '''
import subprocess
from dsl.errors import TransientError

HERE = Path(__file__).parent


def wait_for_file(name, stage):
    end = time.monotonic() + 300
    while not (HERE / name).exists():
        if stage.stop_requested():
            raise StopRequested("saved")
        if time.monotonic() > end:
            raise DataError(f"{name} never came")
        time.sleep(0.01)


@op(version=1, run="toy:meet", resumable=True)
@frozen(kw_only=True)
class Meet:
    """Goes on when the others are there too."""
    name: str
    others: tuple[str, ...] = ()
    text: Text | None = None
    output = Text


def meet(config, stage):
    count_call(config.name)
    (HERE / f"{config.name}.here").touch()
    for other in config.others:
        wait_for_file(f"{other}.here", stage)
    (stage.out_dir / "text.txt").write_text(config.name)


@op(version=1, run="toy:alone")
@frozen(kw_only=True)
class Alone:
    """Refuses to run beside another one of its kind."""
    name: str
    output = Text


def alone(config, stage):
    os.mkdir(HERE / "occupied")
    time.sleep(0.2)
    os.rmdir(HERE / "occupied")
    (stage.out_dir / "text.txt").write_text(config.name)


@op(version=1, run="toy:gpus", gpu=True)
@frozen(kw_only=True)
class Gpus:
    """Writes which GPUs it sees, while the other runs."""
    name: str
    other: str
    output = Text


def gpus(config, stage):
    (HERE / f"{config.name}.here").touch()
    wait_for_file(f"{config.other}.here", stage)
    (stage.out_dir / "text.txt").write_text(os.environ["CUDA_VISIBLE_DEVICES"])


class Busy(Exception):
    pass


class VeryBusy(Busy):
    pass


@op(version=1, run="toy:flaky", resumable=True)
@frozen(kw_only=True)
class Flaky:
    """Fails so many times, and counts its steps."""
    times: int
    error: str = "transient"
    text: Text | None = None
    output = Text
    transient = ("toy.Busy",)


def flaky(config, stage):
    tries = len(list(stage.work_dir.iterdir()))
    stage.log({"flaky/try": tries}, step=tries)
    (stage.work_dir / str(tries)).touch()
    print("try", tries, flush=True)
    if tries < config.times:
        raise {"transient": TransientError, "declared": VeryBusy, "data": DataError}[config.error]("the server is busy")
    (stage.out_dir / "text.txt").write_text(str(tries))
    (stage.out_dir / "started_before.txt").write_text(str(stage.started_before))


@op(version=1, run="toy:look")
@frozen(kw_only=True)
class Look:
    """Writes what a stage finds around it."""
    token: str = ""
    output = Text


def look(config, stage):
    found = {
        "open": sorted(os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
                       if os.path.exists(f"/proc/self/fd/{name}")),
        "group": os.getpgid(0) == os.getpid(),
        "parent": Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\\0")[1:3],
        "parent_maps": "torch" in Path(f"/proc/{os.getppid()}/maps").read_text(),
        "modules": sorted(sys.modules),
        "argv": sys.argv[0],
        "hash_seed": os.environ["PYTHONHASHSEED"],
        "hash": hash("dflow"),
        "threads": os.environ["OMP_NUM_THREADS"],
        "compiled": os.environ["TORCHINDUCTOR_CACHE_DIR"],
        "fail_at": os.environ.get("DFLOW_FAIL_AT", ""),
        "threads_alive": sum(1 for _ in Path("/proc/self/task").iterdir()),
    }
    if config.token:
        print("the token is", config.token, flush=True)
        subprocess.run(["echo", "a child says", config.token])
    (stage.out_dir / "text.txt").write_text(json.dumps(found))
    if config.token == "wrong":
        raise DataError(f"{config.token} is refused")


@op(version=1, run="toy:small")
@frozen(kw_only=True)
class Small:
    """Writes its threads, beside another one where asked; loads torch's OpenMP runtime, which tells how it waits."""
    size: int
    beside: str = ""
    text: Text | None = None
    output = Text

    def threads(self, folders):
        text = folders["text"]
        if self.size < 0:
            return self.size if self.size < -1 else {}[self.size]
        return 1 if self.size + (len((text / "text.txt").read_text()) if text else 0) < 100 else None


def small(config, stage):
    import ctypes, importlib.util
    library, = Path(importlib.util.find_spec("torch").origin).parent.glob("lib/libgomp*")
    ctypes.CDLL(str(library))
    if config.beside:
        (HERE / f"{config.size}.here").touch()
        wait_for_file(f"{config.beside}.here", stage)
    (stage.out_dir / "text.txt").write_text(os.environ["OMP_NUM_THREADS"])


def square(number):
    return number * number


@op(version=1, run="toy:spawn")
@frozen(kw_only=True)
class Spawn:
    """Uses worker processes."""
    output = Text


def spawn(config, stage):
    import multiprocessing
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        (stage.out_dir / "text.txt").write_text(str(pool.map(square, [2, 3])))
'''
HEAD = '[pipeline]\nname = "side"\nops = ["toy.py"]\n'


def side(folder: Path, nodes: str) -> Toy:
    """A toy with the ops of this module as well, and a pipeline of these nodes."""
    toy = Toy(folder, HEAD + nodes)
    file = folder / "toy.py"
    file.write_text(file.read_text() + MORE_OPS)
    return toy
