"""`python -m epigemm.bench`: where the benchmarks are. They belong to the repository, not to the package."""

if __name__ == "__main__":
    print(
        "The benchmarks are run from a checkout of the repository, where `make bench` installs what they need:"
    )
    print("    make bench                   # the models' layers, with a table and plots")
    print("    python -m benchmarks --help  # everything else")
