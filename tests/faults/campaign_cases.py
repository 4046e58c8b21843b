"""The cases of the fault campaign: which rank fails, how, and at what moment of which world.

A case follows from a seed and a number alone, so that an identifier such as "0-17" is enough to see it again.
"""

import random
from dataclasses import dataclass

BACKEND = "backend"  # a program of torch.distributed's on init_process_group("murmura"), rather than murmura's DDP
THREADS, SHARED_MEMORY, GLOO, HIERARCHICAL, _ = TRANSPORTS = (
    "threads", "shared_memory", "gloo", "hierarchical", BACKEND,
)  # fmt: skip
ALGORITHMS = (
    "gradient_allreduce", "bytegrad", "decentralized", "shift_one", "low_precision_decentralized", "qadam", "async",
    "local_sgd", "diloco", "powersgd", "push_sum", "streaming_diloco", "sparse_loco", "uneven_payloads",
    "averaged_moments",
)  # fmt: skip
# They exchange gradients, in the first rounds at least.
WITH_BUCKETS = ("gradient_allreduce", "bytegrad", "qadam", "powersgd", "uneven_payloads")
STOCK_DDP, FSDP2, MESSAGES, WORKS, SUBGROUPS = PROGRAMS = ("stock_ddp", "fsdp2", "messages", "works", "subgroups")
PERIOD = len(TRANSPORTS) * len(ALGORITHMS)

# What becomes of the culprit. A thread can neither be killed nor stopped: there "stop" is a wait without an end.
FAULTS = {
    THREADS: ("raise", "raise", "sys.exit", "stop"),
    SHARED_MEMORY: (
        PROCESS_FAULTS := ("raise", "raise", "kill", "kill", "stop", "os._exit", "sys.exit", "sys.exit unclosed")
    ),
    GLOO: PROCESS_FAULTS,
    HIERARCHICAL: PROCESS_FAULTS,
    BACKEND: PROCESS_FAULTS,
}

# When: the first word of each is the call of the user's program that the moment belongs to.
MOMENTS = (
    "constructor, before",
    "constructor, inside an operation",
    "forward",
    "backward",
    "communication, bucket ready",
    "communication, inside an operation",
    "step",
    "save, before",
    "save, inside state_dict",
    "join, next batch",
    "set_algorithm, before",
    "set_algorithm, inside",
    "close, before",
    "close, after",
    "end",
    "any moment, from outside",
)
ON_BACKEND = ("constructor, before", "forward", "backward", "step", "close, before", "end", "any moment, from outside")
IN_OPERATION = ("constructor, inside an operation", "communication, inside an operation")

HOSTS = {
    2: ((0, 1), (1, 0)),
    3: ((0, 0, 1), (0, 1, 1), (0, 1, 0)),
    4: ((0, 0, 1, 1), (0, 1, 0, 1), (1, 1, 0, 0), (0, 1, 1, 0), (0, 0, 0, 1)),
}

STOP_SECONDS = 3.0  # the deadline of every wait, where it must pass
PATIENT_SECONDS = 15.0  # where it must not
COMPUTE_SECONDS = 0.3  # for which a late survivor computes


@dataclass(frozen=True)
class Case:
    """One fault in one world."""

    seed: int
    number: int
    transport: str
    algorithm: str  # or the program, on the backend
    other_algorithm: str  # what set_algorithm changes to
    world_size: int
    hosts: tuple[int, ...] | None
    culprit: int
    fault: str
    moment: str
    count: int  # the round, or the operation of the culprit's, in which it happens
    delay: float  # seconds that a fault from outside waits once all ranks train
    late: int | None  # a survivor that computes for a while around the fault, and so hears of it last
    in_world: bool  # whether threads are started by run_world, which cancels the others, or each by itself

    @property
    def id(self) -> str:
        return f"{self.seed}-{self.number}"

    @property
    def timeout(self) -> float:
        return STOP_SECONDS if self.fault == "stop" else PATIENT_SECONDS

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.culprit]

    @property
    def is_late(self) -> bool:
        return self.late in self.survivors

    def __str__(self) -> str:
        where = f" on hosts {list(self.hosts)}" if self.hosts else ""
        where += f", rank {self.late} late" if self.is_late else ""
        where += ", run_world" if self.in_world else ""
        return (
            f"{self.id}: {self.transport}, {self.algorithm}, {self.world_size} ranks{where}; "
            f"rank {self.culprit}: {self.fault} at: {self.moment} ({self.count})"
        )


def case_of(seed: int, number: int) -> Case:
    """Case `number` of the campaign of `seed`; PERIOD of them have every transport with every algorithm or program."""
    chance = random.Random(f"{seed}/{number}")
    transport = TRANSPORTS[number % len(TRANSPORTS)]
    place = number % PERIOD // len(TRANSPORTS)
    if transport == BACKEND:
        algorithm = PROGRAMS[place % len(PROGRAMS)]
    else:
        algorithm = random.Random(f"{seed}/{number // PERIOD}").sample(ALGORITHMS, len(ALGORITHMS))[place]
    world_size = chance.choice((2, 3, 4))
    is_spread = transport == HIERARCHICAL or chance.random() < 0.3
    hosts = chance.choice(HOSTS[world_size]) if is_spread else None
    fault = chance.choice(FAULTS[transport])
    moment = chance.choice([each for each in MOMENTS if _can_be(each, transport, algorithm, fault)])
    return Case(
        seed,
        number,
        transport,
        algorithm,
        other_algorithm=chance.choice([each for each in ALGORITHMS if each not in (algorithm, "qadam")]),
        world_size=world_size,
        hosts=hosts,
        culprit=chance.randrange(world_size),
        fault=fault,
        moment=moment,
        count=chance.randint(1, _most(moment)),
        delay=chance.uniform(0.0, 0.2),
        late=chance.randrange(world_size) if chance.random() < 0.5 else None,
        in_world=transport == THREADS and chance.random() < 0.6,
    )


def _can_be(moment: str, transport: str, algorithm: str, fault: str) -> bool:
    if transport == BACKEND and moment not in ON_BACKEND:
        return False
    if moment == "any moment, from outside":
        return transport != THREADS and fault in ("kill", "stop")
    if moment == "communication, bucket ready":
        return algorithm in WITH_BUCKETS
    if (transport, algorithm, fault) == (THREADS, "async", "stop"):
        # The thread that averages goes on while only the one that trains is stopped: nobody waits for that.
        return moment not in ("forward", "backward", "step")
    return True


def _most(moment: str) -> int:
    if moment.startswith("constructor"):
        return 3
    if moment == "communication, bucket ready":
        return 2  # later QAdam has no buckets any more
    return 8 if moment in IN_OPERATION else 4
