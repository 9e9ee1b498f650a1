"""The writing side of Megatron's layouts: what each rank of the target job holds, and the trees of its files."""
