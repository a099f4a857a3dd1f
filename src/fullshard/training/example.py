"""A config file with every key, its default and what it is for."""

EXAMPLE = """\
# A config of `fullshard train`. Every key is here; those that are commented out have the value shown.
# Paths are relative to this file. `--set training.steps=200` changes a key for one run.

output: runs/gpt             # what the run writes; the same command again resumes it

model:                       # exactly one of gpt, path and config
  gpt:                       # the built-in GPT, from scratch
    layers: 4
    heads: 4
    width: 256
    # context: 256           # longest sequence (training.sequence_length)
    # vocabulary: 257        # (the tokenizer's)
    # norm: rms              # or layer
    # positions: rotary      # or learned
  # path: models/llama       # a Hugging Face folder: fine-tune its weights
  # config: models/llama/config.json   # its shape only: train from scratch
  # weights: runs/old/model  # with gpt or config: begin with the weights of a checkpoint

data:
  train: [texts]             # files, globs, or folders (their .txt, .md and .jsonl files)
  # validation: [more/*.txt] # texts of their own for the validation loss; else a part of data.train:
  # validation_fraction: 0.05
  # text: text               # the field of a .jsonl file that holds the text
  # prompt: question         # or two fields: only the second is learned, the first is given
  # completion: answer
  # tokenizer: models/llama  # a folder, a tokenizer.json, or bytes (the model's own; bytes for gpt)
  # cache: tokens            # where tokens are kept, by content (OUTPUT/tokens)

training:                    # sizes of batches are of all ranks together
  steps: 1000
  sequence_length: 256
  batch_size: 32             # sequences a step; or batch_tokens: 8192
  # micro_batch_size: 8      # sequences that a rank computes at once (all of its share)
  learning_rate: 3.0e-4
  # final_learning_rate: 0.1 # at the last step, as a part of learning_rate
  # warmup_steps: 100        # by default a tenth of a run of fewer than 100 steps
  # schedule: cosine         # or linear, constant
  # weight_decay: 0.1        # of matrices; norms and biases have none
  # betas: [0.9, 0.95]
  # eps: 1.0e-8
  # clip: 1.0                # the gradient norm; null for no clipping
  # time_limit_s: 3600       # save and stop after this time; the same command resumes

# sharding:
#   strategy: zero3          # replicate, zero1, zero2, zero3, hybrid; auto chooses
#   precision: fp32          # bf16, fp16
#   checkpoint_activations: false  # true; offload: and block inputs in host memory
#   offload: null            # host, optimizer, auto, or {device: 22GiB, host: 90GiB, disk: /scratch/run}
#   state: exact             # 8bit: the optimizer's state in 8-bit blocks

# evaluation:
#   every: 100               # steps; 0 is never
#   sequences: 256           # at most

# checkpoints:
#   every: 500               # steps
#   keep_last: 2
#   model_dtype: fp32        # of the final model: bf16, fp16

# logging:
#   every: 1                 # steps; as often a run looks whether it is to stop
#   tensorboard: true
#   wandb: null              # true, or {project: fullshard, entity: null, name: gpt, mode: offline}
#   mlflow: null             # true, or {tracking_uri: http://host:5000, experiment: fullshard, name: gpt}

# sample:                    # what the trained model writes into the report
#   prompt: "\\n"
#   tokens: 200              # 0 is none
#   temperature: 0.7

# device: auto               # a GPU for each rank if there is one; cpu, cuda
# seed: 0
"""
