"""``python make_model.py FOLDER SEED``: a Llama of two layers with random weights and a tokenizer of bytes."""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

folder, seed = Path(sys.argv[1]), int(sys.argv[2])
words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
tokenizer = Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
fast.save_pretrained(folder)
torch.manual_seed(seed)
config = LlamaConfig(
    vocab_size=len(words),
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=1024,
    bos_token_id=0,
    eos_token_id=1,
    tie_word_embeddings=False,
    dtype="float32",
)
LlamaForCausalLM(config).save_pretrained(folder)
