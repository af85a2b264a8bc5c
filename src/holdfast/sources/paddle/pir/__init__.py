"""Programs of Paddle 3 (PIR): the JSON of `paddle.jit.save` as plain data, and as Holdfast programs that run."""
