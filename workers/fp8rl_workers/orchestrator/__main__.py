"""`python -m fp8rl_workers.orchestrator`: see `main`."""

from fp8rl_workers.process import end_on_sigterm

if __name__ == "__main__":
    end_on_sigterm()  # before an import that takes seconds

    from fp8rl_workers.orchestrator.main import main

    main()
