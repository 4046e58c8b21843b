"""What algorithms are made of, for those that write their own; docs/algorithms.md says which algorithm uses what.

- `FlatWeights`: parameters and buffers as a few flat tensors. `as_real`: complex values for compressors.
- `AfterStepImpl`: exchanges weights after the optimizer's step, on all ranks as often, whichever steps are skipped.
- `BackgroundExchanges`: exchanges that run beside training; each is a `PendingExchange` to wait for.
- `Hierarchy`: reduces inside each host, and exchanges between the hosts' leaders.
- `compressed_mean`: makes the `CompressedMean` of one tensor, in the way that its compressor declares; a `CodecThread`
  encodes beside the exchange.
- `ParameterState`: tensors by parameter, which stay with it when buckets are cut anew, and are restored when a step is
  skipped; `gradients_are_gone` tells that one was.
- `mean_bytes`, `payload_bytes`, `num_elements`: what `Algorithm.bytes_per_round` is computed with.
"""

from murmura.algorithms.after_step import AfterStepImpl
from murmura.algorithms.background_exchange import BackgroundExchanges, PendingExchange
from murmura.algorithms.codec_thread import CodecThread
from murmura.algorithms.compressed import CompressedMean
from murmura.algorithms.hierarchy import Hierarchy
from murmura.algorithms.means import compressed_mean
from murmura.algorithms.parameter_state import ParameterState
from murmura.algorithms.skipped_steps import gradients_are_gone
from murmura.algorithms.traffic import mean_bytes, num_elements, payload_bytes
from murmura.algorithms.weights import FlatWeights, as_real

__all__ = [
    "AfterStepImpl",
    "BackgroundExchanges",
    "CodecThread",
    "CompressedMean",
    "FlatWeights",
    "Hierarchy",
    "ParameterState",
    "PendingExchange",
    "as_real",
    "compressed_mean",
    "gradients_are_gone",
    "mean_bytes",
    "num_elements",
    "payload_bytes",
]
