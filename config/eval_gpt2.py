# The loss of OpenAI's gpt2 (124M parameters) on a data set. Trains nothing and writes nothing.
#
#     python train.py config/eval_gpt2.py --dataset=shakespeare
#     # or gpt2-medium, gpt2-large
#     python train.py config/eval_gpt2.py --dataset=shakespeare --init_from=gpt2-xl

init_from = "gpt2"
eval_only = True
eval_iters = 500  # batches of each split; more give a better estimate
batch_size = 8
compile = False  # compiling takes longer than one evaluation
