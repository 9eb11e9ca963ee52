"""Sentences by sentence-transformers: their vectors, and how well pairs of them fit."""

import hashlib
import sys

from sentence_transformers import CrossEncoder, SentenceTransformer

encoder, judge = sys.argv[1:]
sentences = [" ".join(f"w{4 + (i * j) % 500}" for j in range(1, 3 + 5 * i)) for i in range(1, 9)]
vectors = SentenceTransformer(encoder, device="cpu").encode(sentences, batch_size=4)
print(vectors.shape, vectors.dtype, hashlib.sha256(vectors.tobytes()).hexdigest())
scores = CrossEncoder(judge, device="cpu").predict([(a, sentences[0]) for a in sentences])
print(scores.shape, scores.dtype, hashlib.sha256(scores.tobytes()).hexdigest())
