"""Tests of records, files, images, batches and micro-batches."""
