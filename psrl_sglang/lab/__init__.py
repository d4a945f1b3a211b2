"""What demos, benchmarks and tests need around the package: models made on the spot, real SGLang servers."""
