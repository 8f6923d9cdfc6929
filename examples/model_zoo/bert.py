"""BERT fine-tuning with metrics, as Model Zoo's Trainer is used from Python: `python -m examples.model_zoo.bert CPU`.

The sentences are in a toy language in which the last adjective determines the sentiment. Batches are a tokenizer's
`BatchEncoding`.
"""

import sys

import torch
from torch import nn
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

import firstloss.cstorch as cstorch
from firstloss.trainer import Trainer
from firstloss.trainer.callbacks import (
    CheckLoss,
    Checkpoint,
    CountParams,
    Logging,
    MixedPrecision,
    ModelEvalMetrics,
    TrainingLoop,
)
from firstloss.trainer.loggers import JSONLogger, ProgressLogger

CLASSES = 3


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=16,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.bert = BertForSequenceClassification(config)
        self.accuracy = cstorch.metrics.AccuracyMetric(name="accuracy")
        self.f1 = cstorch.metrics.FBetaScoreMetric(num_classes=CLASSES, average_type="macro", name="f1")

    def forward(self, data):
        outputs = self.bert(**data)
        if not self.training:
            predictions = outputs.logits.argmax(-1)
            self.accuracy(labels=data["labels"], predictions=predictions)
            self.f1(labels=data["labels"], predictions=predictions)
        return outputs.loss


def sentences(count, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(CLASSES, 64, (count, 12), generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    tokens[torch.arange(count), torch.randint(1, 12, (count,), generator=generator)] = labels
    return [
        {"input_ids": t, "attention_mask": torch.ones(12, dtype=torch.long), "labels": label}
        for t, label in zip(tokens, labels, strict=True)
    ]


def collate(samples):
    return BatchEncoding({key: torch.stack([sample[key] for sample in samples]) for key in samples[0]})


def input_fn(count, seed, shuffle):
    generator = torch.Generator().manual_seed(seed)
    return torch.utils.data.DataLoader(
        sentences(count, seed), batch_size=8, shuffle=shuffle, generator=generator, collate_fn=collate
    )


train_dataloader = cstorch.utils.data.DataLoader(input_fn, 96, seed=1, shuffle=True)
val_dataloader = cstorch.utils.data.DataLoader(input_fn, 32, seed=2, shuffle=False)


def optimizer(model):
    decayed = [p for name, p in model.named_parameters() if p.dim() > 1]
    others = [p for name, p in model.named_parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "tags": "decayed"}, {"params": others, "weight_decay": 0.0}]
    return cstorch.optim.AdamW(groups, lr=1e-3, weight_decay=0.01, correct_bias=False)


def trainer(device, model_dir, max_steps=12):
    return Trainer(
        device=device,
        model_dir=model_dir,
        model=Classifier,
        optimizer=optimizer,
        schedulers=[
            lambda optimizer: cstorch.optim.lr_scheduler.LinearLR(
                optimizer, initial_learning_rate=1e-3, end_learning_rate=0.0, total_iters=12
            ),
            lambda optimizer: cstorch.optim.weight_decay_scheduler.ConstantWD(
                optimizer, val=0.01, param_group_tags="decayed"
            ),
        ],
        precision=MixedPrecision(enabled=False, max_gradient_norm=1.0),
        loop=TrainingLoop(max_steps=max_steps, eval_frequency=6),
        checkpoint=Checkpoint(steps=4),
        logging=Logging(log_steps=1),
        callbacks=[CheckLoss(), ModelEvalMetrics(), CountParams()],
        loggers=[ProgressLogger(), JSONLogger()],
        seed=1,
    )


if __name__ == "__main__":
    made = trainer(sys.argv[1] if len(sys.argv) > 1 else "CSX", "runs/bert")
    made.fit(train_dataloader, val_dataloader)
    print(made.validate_all([val_dataloader], "runs/bert/checkpoints/step_*"))
