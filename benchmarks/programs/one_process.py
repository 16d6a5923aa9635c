"""One process trains the whole model: each minibatch at once, or (variant `micro`) in microbatches."""

from common import load_job


def main() -> None:
    job = load_job()
    model = job.model()
    optimizer = job.task.optimizer(model.parameters())
    num_parts = job.num_microbatches if job.variant == "micro" else 1
    for inputs, targets in job.minibatches():
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(inputs.chunk(num_parts), targets.chunk(num_parts)):
            loss = job.task.loss(model(x), y) / num_parts
            loss.backward()
            total += loss.item()
        optimizer.step()
        job.losses.append(total)
    job.report()


if __name__ == "__main__":
    main()
