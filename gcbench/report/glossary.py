"""The words of the tables, each explained once: by `gcbench list words`, and in the report."""

from __future__ import annotations

LONG = 12
"""Rows of a table in the terminal from which the reader is pointed to this glossary."""
POINTER = "What the words mean: `gcbench list words --details`."

WORDS: dict[str, str] = {
    "accuracy": "The share of test examples that the trained model gets right, in percent. Tasks "
    "that have none, such as a language model, are compared by their test loss.",
    "all-gather": "A collective after which every worker has the payloads of all workers. Each "
    "decodes and averages them itself, so what it gets back grows with the number of workers.",
    "all-reduce": "A collective after which every worker has the sum of what all workers handed "
    "over. It needs payloads that can be summed as they are.",
    "band": "The lowest to the highest result of the uncompressed runs over their seeds. A method "
    "within it is not told from `none` by these runs.",
    "bias": "The mean error of a method over its random numbers. An unbiased method is right on "
    "average; a biased one usually needs error feedback.",
    "bits": "Measured bits an element of the gradient: 8 times the bytes handed over, divided by "
    "the number of elements. fp32 has 32.",
    "bucket": "Parameters whose gradients are laid end to end and exchanged together, as "
    "DistributedDataParallel does.",
    "busbw": "Bus bandwidth as nccl-tests define it: bytes a second that the busiest link would "
    "carry if the collective moved no more than it must.",
    "codec": "The pair of `encode`, from a gradient to a payload, and `decode`, back again.",
    "collective": "A communication in which all workers take part, such as all-reduce, all-gather "
    "and reduce-scatter.",
    "compressor": "A method: what is sent in the place of a gradient, with its settings.",
    "contraction": "Whether the error of a method is smaller than the gradient by a fixed factor. "
    "Error feedback is proved to converge for such methods.",
    "down": "What a worker gets back in a step. `ratio down` is the bytes of fp32 divided by "
    "these.",
    "error feedback": "What a step's code has lost, the residual, is kept by the worker and added "
    "to its next gradient, so that nothing is lost for good. Also called memory.",
    "front": "The rows that no other row of equal budget beats: none is better, by the interval of "
    "the paired difference, for as few bytes (the Pareto front).",
    "hybrid sharding": "Each node holds the whole model, cut into shards over its ranks, so that a "
    "shard has replicas on the other nodes. Gradients are exchanged inside a node, then between "
    "the replicas: the two-level exchange.",
    "interval": "The 95 % confidence interval of a mean over seeds, by Student's t; it assumes "
    "normal differences. An interval around zero means: these runs cannot distinguish them.",
    "link": "The network between two machines: its bandwidth in Gbit/s and its latency in µs.",
    "local steps": "Optimizer steps that each worker takes by itself before the difference of its "
    "parameters is exchanged (`--local-steps`); 1 is the usual exchange of gradients.",
    "loopback": "The network of a machine with itself: memory copies, no cable. Times over it say "
    "nothing about a cluster.",
    "memory": "What a worker carries from step to step beside the model: none, a residual (error "
    "feedback), a momentum, or both (deep gradient compression).",
    "modelled": "Computed from a link and from bytes, not measured; marked by ~.",
    "nominal": "What the paper counts, in bits an element; `payload` is what is sent here.",
    "none": "The uncompressed exchange of fp32 gradients: the baseline of every comparison.",
    "payload": "The encoded bytes that a worker hands over (up) and gets back (down), counted from "
    "the tensors that were sent.",
    "points": "Percentage points: 91 % is 2 points above 89 %.",
    "published": "What a paper says of the same run. A difference at another number of steps is of "
    "the budget and no verdict on a method.",
    "rank": "The number of a worker, from 0. In a table of results: the places that a method "
    "may have in its tier; those of two methods that the seeds do not tell apart overlap.",
    "reduce-scatter": "A collective after which every worker has the sum of one part of the "
    "gradients. It is the first half of an all-reduce, and what FSDP uses.",
    "residual": "Gradient minus what its code decodes to: what the code has lost.",
    "seed": "The number from which a run's random numbers follow. Runs that differ in the seed "
    "alone show how much chance changes.",
    "segment": "A part of a bucket that has one scale of its own, usually a tensor.",
    "sparsification": "To send a few of the elements and their places, and zeros for the others.",
    "quantization": "To send every element with fewer bits.",
    "statistic": "What workers agree on before they encode, such as a common scale.",
    "step": "One update of the model: every worker computes a gradient, they exchange, all apply.",
    "tier": "A group of methods whose measured bits lie in one range, ranked among themselves.",
    "two-shot": "An exchange in two rounds: each worker owns a part of the gradient, gets all "
    "payloads of that part, averages them, and sends the average encoded again. A sharded "
    "parameter server.",
    "up": "What a worker hands over in a step. `ratio up` is the bytes of fp32 divided by these.",
    "wire": "The bytes that cross the network: the payload with the collective's own factor, as a "
    "ring all-reduce sends most of it twice.",
    "worker": "One process that computes a gradient on its share of the batch, usually one GPU.",
}
"""Word -> what it means, in the order of the alphabet."""
WORDS = dict(sorted(WORDS.items()))


def rows() -> list[dict[str, str]]:
    """Return one row a word: `name` and `what`."""
    return [{"name": word, "what": told} for word, told in WORDS.items()]
