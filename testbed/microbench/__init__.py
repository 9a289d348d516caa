"""The micro-benchmark of `testbed comm`: one exchange, many sizes, several backends in one job.

`records.comm.CommConfig` says what is to be measured, `plan` in which order, `contestants` who
takes part, `payload` what travels and what must arrive, `exchange` how one exchange runs, `measure`
takes the samples, `member` is the life of one process. Measuring ends with samples
(`measure.SizeSamples`); everything after them is presentation: `bandwidth` makes bandwidths of
seconds, `results` the rows of the record, `table` their text.
"""
