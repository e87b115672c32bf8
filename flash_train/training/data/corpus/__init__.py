"""From text to shards: which documents there are, how they are divided into work, and how it is done and taken up."""

from flash_train.training.data.corpus.build import Corpus, build_corpus
from flash_train.training.data.corpus.processes import WorkerDied

__all__ = ["Corpus", "WorkerDied", "build_corpus"]
