"""Operations on many lanes at once, for CPUs and GPUs; `operations` says which call goes where."""
