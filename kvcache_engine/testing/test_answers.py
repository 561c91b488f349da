"""What ``pytest --pyargs kvcache_engine.testing --ml-backend=NAME`` collects."""

from kvcache_engine.testing.answers import AnswerTests


class TestAnswers(AnswerTests):
    chosen_by_option = True
