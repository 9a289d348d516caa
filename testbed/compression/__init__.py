"""Compressors: values in, payloads out; pure, so they run over any backend or none."""
